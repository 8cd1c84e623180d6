#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float* x [[buffer(0)]],
    uint2 i [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {  // error: attribute-type
  x[i.x] = size.x;
}
