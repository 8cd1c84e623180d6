#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float4* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  float3 v = x[i].xyz;
  x[i].x = dot(v, float4(1.0f));  // error: overload
}
