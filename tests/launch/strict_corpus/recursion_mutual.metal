#include <metal_stdlib>
using namespace metal;

inline bool is_odd(uint n);

inline bool is_even(uint n) {
  return n == 0 || is_odd(n - 1);  // error: recursion
}

inline bool is_odd(uint n) {
  return n != 0 && is_even(n - 1);  // error: recursion
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = is_even(i) ? 1.0f : 0.0f;
}
