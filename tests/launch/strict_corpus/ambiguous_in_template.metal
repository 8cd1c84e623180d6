#include <metal_stdlib>
using namespace metal;

template <typename A, typename B>
A larger(A a, B b) {
  return A(max(a, b));  // error: overload
}

kernel void k(
    device float* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = larger(x[i], i);
}
