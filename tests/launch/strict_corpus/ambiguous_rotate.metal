#include <metal_stdlib>
using namespace metal;

kernel void k(
    device uint* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = rotate(x[i], 5);  // error: overload
}
