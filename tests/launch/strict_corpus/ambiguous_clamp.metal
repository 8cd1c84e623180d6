#include <metal_stdlib>
using namespace metal;

kernel void k(
    device uint* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  const int top = 7;
  x[i] = clamp(x[i], top, 2.5f);  // error: overload
}
