#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  matrix<float, 5, 4> m;  // error: type
  x[i] = m[0][0];
}
