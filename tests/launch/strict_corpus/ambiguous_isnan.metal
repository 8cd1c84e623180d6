#include <metal_stdlib>
using namespace metal;

kernel void k(
    device int* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = isnan(x[i]) ? 0 : x[i];  // error: overload
}
