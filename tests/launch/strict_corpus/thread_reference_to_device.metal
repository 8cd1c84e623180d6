#include <metal_stdlib>
using namespace metal;

inline void clear(thread float& value) {
  value = 0.0f;
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  clear(x[i]);  // error: address-space
}
