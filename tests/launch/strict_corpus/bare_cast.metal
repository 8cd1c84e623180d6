#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  device uint* bits = reinterpret_cast<uint*>(x);  // error: address-space
  bits[i] = 0;
}
