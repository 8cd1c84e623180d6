#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  thread float* scratch = new float[4];  // error: new-delete
  scratch[0] = x[i];
  x[i] = scratch[0];
}
