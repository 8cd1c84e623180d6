#include <metal_stdlib>
using namespace metal;

kernel void k(device atomic_ulong* peak [[buffer(0)]], uint i [[thread_position_in_grid]]) {  // error: atomic-64
  atomic_max_explicit(peak, ulong(i), memory_order_relaxed);
}
