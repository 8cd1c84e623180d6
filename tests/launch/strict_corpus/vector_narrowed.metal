#include <metal_stdlib>
using namespace metal;

kernel void k(device float4* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  const float first = x[i];  // error: compile
  y[i] = first;
}
