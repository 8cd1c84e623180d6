#include <metal_stdlib>
using namespace metal;

kernel void k(
    device ulong* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  __int128 product = x[i];  // error: type
  x[i] = ulong(product >> 64);
}
