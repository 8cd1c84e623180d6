#include <metal_stdlib>
using namespace metal;

template <typename T>
inline T f(int n) {
  return n ? f<T>(n - 1) : T(0);  // error: recursion
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = f<float>(3);
}
