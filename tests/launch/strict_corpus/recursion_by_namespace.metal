#include <metal_stdlib>
using namespace metal;

namespace q {
inline float f(int n) {
  return n ? q::f(n - 1) : 0;  // error: recursion
}
}  // namespace q

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = q::f(3);
}
