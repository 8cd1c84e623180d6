#include <metal_stdlib>
using namespace metal;

template <auto N>  // error: cxx-version
inline float times(float value) {
  return N * value;
}

kernel void k(
    device float* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = times<3>(x[i]);
}
