#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float* x [[buffer(31)]],  // error: buffer-index
    uint i [[thread_position_in_grid]]) {
  x[i] = 0.0f;
}
