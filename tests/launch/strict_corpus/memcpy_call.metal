#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float y[4];
  memcpy(y, x, sizeof(y));  // error: undeclared
  x[i] = y[0];
}
