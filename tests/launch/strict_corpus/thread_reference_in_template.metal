#include <metal_stdlib>
using namespace metal;

template <typename T>
inline void clear(thread T& value) {
  value = T(0);
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  clear(x[i]);  // error: thread-reference
}
