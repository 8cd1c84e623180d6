#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float4* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  device float* second = &x[i].y;  // error: vector-element
  *second = 0.0f;
}
