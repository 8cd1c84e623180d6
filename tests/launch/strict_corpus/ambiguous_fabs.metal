#include <metal_stdlib>
using namespace metal;

kernel void k(
    device int* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = int(fabs(x[i]));  // error: overload
}
