#include <metal_stdlib>
using namespace metal;

kernel void k(
    device int4* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = int4(x[i] * 0.5f);  // error: compile
}
