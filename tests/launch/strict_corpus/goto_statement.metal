#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  int n = 0;
again:
  x[i] += 1.0f;
  if (++n < 4) {
    goto again;  // error: goto
  }
}
