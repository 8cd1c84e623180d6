#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float* x [[buffer(0)]],
    device half* y [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = as_type<float>(y[i]);  // error: overload
}
