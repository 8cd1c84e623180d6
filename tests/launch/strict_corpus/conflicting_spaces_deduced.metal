#include <metal_stdlib>
using namespace metal;

template <typename T>
inline void accumulate(thread T& total, T value) {
  total += value;
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  accumulate(x[i], 1.0f);  // error: address-space
}
