#include <metal_stdlib>
using namespace metal;

kernel void k(device atomic_uint* counter [[buffer(0)]]) {
  atomic_fetch_add(counter, 1u);  // error: undeclared
}
