#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  for (uint thread = 0; thread < i; ++thread) {  // error: keyword
    x[thread] = 1;
  }
}
