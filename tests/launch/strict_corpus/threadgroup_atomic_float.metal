#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup atomic_float total;  // error: atomic-float
  atomic_fetch_add_explicit(&total, x[i], memory_order_relaxed);
}
