#include <metal_stdlib>
using namespace metal;

template <typename T>
inline void store(threadgroup T* target, T value) {
  target[0] = value;
}

template <typename T>
inline void twice(device T* x, uint i) {
  store(x + i, x[i] * T(2));  // error: address-space
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  twice(x, i);
}
