#include <metal_stdlib>
using namespace metal;

#define REAL double

inline float square(float x) {
  REAL y = x;  // error: double
  return float(y * y);
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = square(x[i]);
}
