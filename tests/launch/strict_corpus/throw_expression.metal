#include <metal_stdlib>
using namespace metal;

inline float inverse(float x) {
  if (x == 0.0f) {
    throw 1;  // error: exceptions
  }
  return 1.0f / x;
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = inverse(x[i]);
}
