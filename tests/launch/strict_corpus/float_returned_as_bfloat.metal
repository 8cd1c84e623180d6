#include <metal_stdlib>
using namespace metal;

inline bfloat scaled(bfloat value) {
  return value * 0.3f;  // error: bfloat
}

kernel void k(
    device bfloat* y [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  y[i] = scaled(y[i]);
}
