#include <metal_stdlib>
using namespace metal;

template <typename T, int N>
void fill(device T* x) {
  vec<T, N> v(1);  // error: type
  x[0] = v[0];
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  fill<float, 6>(x + i);
}
