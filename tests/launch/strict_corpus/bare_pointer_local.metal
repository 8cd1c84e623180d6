#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float* row = x + 4;  // error: address-space
  row[i] = 1.0f;
}
