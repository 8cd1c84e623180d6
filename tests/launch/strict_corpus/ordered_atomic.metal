#include <metal_stdlib>
using namespace metal;

kernel void k(device atomic_uint* counter [[buffer(0)]]) {
  atomic_fetch_add_explicit(counter, 1u, memory_order_acq_rel);  // error: metal-version
}
