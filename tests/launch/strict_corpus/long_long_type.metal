#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  long long offset = long(i) * 4;  // error: long-long
  x[offset] = 1.0f;
}
