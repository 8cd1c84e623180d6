#include <metal_stdlib>
using namespace metal;

inline float next(float x) {
  thread_local float before = 0.0f;  // error: storage-class
  before += x;
  return before;
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = next(x[i]);
}
