#include <metal_stdlib>
using namespace metal;

float scale(float value);  // error: undefined

kernel void k(
    device float* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = scale(x[i]);
}
