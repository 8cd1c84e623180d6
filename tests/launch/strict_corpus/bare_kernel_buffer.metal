#include <metal_stdlib>
using namespace metal;

kernel void k(const float* x [[buffer(0)]], device float* y [[buffer(1)]],  // error: address-space
              uint i [[thread_position_in_grid]]) {
  y[i] = 1.0f;
}
