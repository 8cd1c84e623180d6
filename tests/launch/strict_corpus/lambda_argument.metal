#include <metal_stdlib>
using namespace metal;

template <typename F>
inline float twice(F f, float v) {
  return f(f(v));
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  const float scale = 2.0f;
  x[i] = twice([=](float v) { return v * scale; }, x[i]);  // error: lambda
}
