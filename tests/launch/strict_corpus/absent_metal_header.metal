#include <metal_stdlib>
using namespace metal;

#include <metal_scan>  // error: include

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = 0;
}
