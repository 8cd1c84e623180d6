#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float4* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  float4 v = x[i];
  v.xx = float2(1.0f);  // error: swizzle
  x[i] = v;
}
