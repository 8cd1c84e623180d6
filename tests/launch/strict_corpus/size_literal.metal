#include <metal_stdlib>
using namespace metal;

kernel void k(
    device ulong* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = 4uz;  // error: literal
}
