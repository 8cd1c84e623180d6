#include <metal_stdlib>
using namespace metal;

using Pointer = float*;  // error: address-space

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = float(sizeof(Pointer));
}
