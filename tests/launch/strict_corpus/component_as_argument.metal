#include <metal_stdlib>
using namespace metal;

inline void halve(thread float& value) {
  value *= 0.5f;
}

kernel void k(
    device float2* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  float2 v = x[i];
  halve(v.y);  // error: vector-element
  x[i] = v;
}
