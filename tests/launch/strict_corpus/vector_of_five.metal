#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  vec<float, 5> v(x[i]);  // error: type
  x[i] = v[4];
}
