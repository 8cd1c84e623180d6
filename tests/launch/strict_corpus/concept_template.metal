#include <metal_stdlib>
using namespace metal;

template <typename T>
concept Small = sizeof(T) <= 2;  // error: cxx-version

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = Small<half> ? 1.0f : 0.0f;
}
