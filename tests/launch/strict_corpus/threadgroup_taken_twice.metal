#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float* x [[buffer(0)]],
    threadgroup float* a [[threadgroup(0)]],
    threadgroup float* b [[threadgroup(0)]],  // error: buffer-index
    uint i [[thread_position_in_grid]]) {
  x[i] = a[0] + b[0];
}
