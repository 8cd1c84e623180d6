#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float* x [[buffer(0)]],
    threadgroup float* a [[buffer(1)]],  // error: attribute
    uint i [[thread_position_in_grid]]) {
  x[i] = a[0];
}
