#include <metal_stdlib>
using namespace metal;

kernel void k(
    device long* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = simd_sum(x[i]);  // error: simd-type
}
