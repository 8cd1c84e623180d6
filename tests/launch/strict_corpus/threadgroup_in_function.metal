#include <metal_stdlib>
using namespace metal;

inline float reverse(float value, uint lane) {
  threadgroup float tile[32];  // error: threadgroup-variable
  tile[lane] = value;
  return tile[31 - lane];
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = reverse(x[i], i % 32);
}
