#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  int fragment = int(i) / 8;  // error: keyword
  x[i] = fragment;
}
