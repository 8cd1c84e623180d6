#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float2* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = x[i].xz;  // error: swizzle
}
