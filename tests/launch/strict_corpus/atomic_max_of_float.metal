#include <metal_stdlib>
using namespace metal;

kernel void k(
    device atomic_float* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  atomic_fetch_max_explicit(x, float(i), memory_order_relaxed);  // error: atomic-type
}
