#include <metal_stdlib>
using namespace metal;

constant float SCALE = 1.0f / sqrt(2.5f + exp(1.5f));  // error: constant-init

kernel void k(
    device float* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = SCALE;
}
