#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  try {  // error: exceptions
    x[i] = 1.0f;
  } catch (...) {  // error: exceptions
    x[i] = 0.0f;
  }
}
