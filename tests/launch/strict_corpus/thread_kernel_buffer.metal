#include <metal_stdlib>
using namespace metal;

kernel void k(device float* y [[buffer(1)]],
              thread float* x [[buffer(0)]],  // error: address-space
              uint i [[thread_position_in_grid]]) {
  y[i] = 1.0f;
}
