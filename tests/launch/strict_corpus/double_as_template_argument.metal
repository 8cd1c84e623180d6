#include <metal_stdlib>
using namespace metal;

template <typename T>
inline T half_of(T x) {
  return x / T(2);
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = float(half_of<double>(x[i]));  // error: double
}
