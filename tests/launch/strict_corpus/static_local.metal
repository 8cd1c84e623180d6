#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  static int calls = 0;  // error: static-local
  x[i] = float(++calls);
}
