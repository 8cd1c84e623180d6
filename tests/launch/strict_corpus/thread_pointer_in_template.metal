#include <metal_stdlib>
using namespace metal;

template <typename T>
inline T norm(thread const T* v) {
  return v[0] * v[0] + v[1] * v[1];
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = norm(x);  // error: thread-reference
}
