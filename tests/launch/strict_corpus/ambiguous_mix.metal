#include <metal_stdlib>
using namespace metal;

kernel void k(
    device half* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = mix(x[i], x[i + 1], 0.5);  // error: overload
}
