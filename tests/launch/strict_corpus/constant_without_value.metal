#include <metal_stdlib>
using namespace metal;

constant float SCALE;  // error: constant-init

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] *= SCALE;
}
