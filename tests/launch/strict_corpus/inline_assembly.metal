#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  asm volatile("nop");  // error: inline-asm
  x[i] = 0.0f;
}
