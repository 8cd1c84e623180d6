#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  uint half = i / 2;  // error: keyword
  x[i] = half;
}
