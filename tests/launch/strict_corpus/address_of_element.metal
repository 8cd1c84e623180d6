#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float4* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  float4 v = x[i];
  thread float* second = &v[1];  // error: vector-element
  *second = 0.0f;
  x[i] = v;
}
