#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = noexcept(x[i] + 1.0f) ? 1.0f : 0.0f;  // error: exceptions
}
