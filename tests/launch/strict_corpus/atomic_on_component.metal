#include <metal_stdlib>
using namespace metal;

kernel void k(
    device uint2* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  auto first = (device atomic_uint*)&x[i].x;  // error: vector-element
  atomic_store_explicit(first, 0u, memory_order_relaxed);
}
