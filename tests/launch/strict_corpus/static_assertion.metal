#include <metal_stdlib>
using namespace metal;

template <int N>
inline float sum(thread const float* v) {
  static_assert(N % 4 == 0, "N is a multiple of 4");  // error: compile
  float total = 0.0f;
  for (int j = 0; j < N; ++j) {
    total += v[j];
  }
  return total;
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float v[6];
  for (int j = 0; j < 6; ++j) {
    v[j] = x[6 * i + j];
  }
  x[i] = sum<6>(v);
}
