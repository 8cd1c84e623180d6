#include <metal_stdlib>
using namespace metal;

inline float factorial(int n) {
  return n < 2 ? 1.0f : float(n) * factorial(n - 1);  // error: recursion
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = factorial(int(x[i]));
}
