#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  const uint bits = *(uint*)(x + i);  // error: address-space
  x[i] = float(bits);
}
