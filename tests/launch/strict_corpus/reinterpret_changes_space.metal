#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup uint* bits = reinterpret_cast<threadgroup uint*>(x);  // error: address-space
  x[i] = float(bits[i]);
}
