#include <metal_stdlib>
using namespace metal;

template <typename T>
inline void clear(T& value) {  // error: address-space
  value = T(0);
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float y = x[i];
  clear(y);
  x[i] = y;
}
