#include <metal_stdlib>
using namespace metal;

threadgroup float tile[32];  // error: threadgroup-variable

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = 1.0f;
}
