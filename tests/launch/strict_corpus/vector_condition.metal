#include <metal_stdlib>
using namespace metal;

kernel void k(device float4* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (x[i] == float4(0.0f)) {  // error: compile
    x[i] = float4(1.0f);
  }
}
