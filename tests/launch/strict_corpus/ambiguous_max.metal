#include <metal_stdlib>
using namespace metal;

kernel void k(
    device int* x [[buffer(0)]],
    device uint* y [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = max(x[i], y[i]);  // error: overload
}
