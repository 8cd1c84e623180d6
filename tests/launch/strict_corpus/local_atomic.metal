#include <metal_stdlib>
using namespace metal;

kernel void k(
    device uint* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  atomic_uint count;
  atomic_store_explicit(&count, 1u, memory_order_relaxed);  // error: atomic-space
  x[i] = 0;
}
