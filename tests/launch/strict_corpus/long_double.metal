#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  const long double third = 1.0f / 3.0f;  // error: double
  x[i] *= float(third);
}
