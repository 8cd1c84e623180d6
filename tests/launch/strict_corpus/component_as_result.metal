#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float2* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  float2 v = x[i];
  float rest = modf(v.x, v.y);  // error: vector-element
  x[i] = v + rest;
}
