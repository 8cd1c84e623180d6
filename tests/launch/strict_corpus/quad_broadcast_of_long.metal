#include <metal_stdlib>
using namespace metal;

kernel void k(
    device long* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = quad_broadcast(x[i], 0);  // error: simd-type
}
