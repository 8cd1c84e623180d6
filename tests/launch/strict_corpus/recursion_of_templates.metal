#include <metal_stdlib>
using namespace metal;

template <typename T, int N>
inline T g(int n);

template <typename T, int N>
inline T f(int n) {
  return n ? g<T, N>(n - 1) : T(0);  // error: recursion
}

template <typename U, int M>
inline U g(int n) {
  return f<U, M>(n);  // error: recursion
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = f<float, 2>(3);
}
