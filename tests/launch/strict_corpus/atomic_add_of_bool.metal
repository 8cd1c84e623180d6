#include <metal_stdlib>
using namespace metal;

kernel void k(
    device atomic_bool* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(x, true, memory_order_relaxed);  // error: atomic-type
}
