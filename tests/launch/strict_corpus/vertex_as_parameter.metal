#include <metal_stdlib>
using namespace metal;

inline float twice(float vertex) {  // error: keyword
  return vertex * 2;
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = twice(x[i]);
}
