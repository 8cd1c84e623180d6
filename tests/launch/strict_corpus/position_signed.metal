#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float* x [[buffer(0)]],
    int i [[thread_position_in_grid]]) {  // error: attribute-type
  x[i] = 0.0f;
}
