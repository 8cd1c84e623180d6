#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  auto square = [](float v) { return v * v; };  // error: lambda
  x[i] = square(x[i]);
}
