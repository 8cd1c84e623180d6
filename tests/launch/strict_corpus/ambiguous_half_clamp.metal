#include <metal_stdlib>
using namespace metal;

kernel void k(
    device half* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = clamp(x[i], 0.0, 1.0);  // error: overload
}
