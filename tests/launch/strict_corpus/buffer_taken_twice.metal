#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float* x [[buffer(0)]],
    const device float* y [[buffer(1)]],
    const device float* z [[buffer(1)]],  // error: buffer-index
    uint i [[thread_position_in_grid]]) {
  x[i] = y[i] + z[i];
}
