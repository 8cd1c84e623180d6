#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(16, 16, 16);  // error: metal-version
  x[i] = float(descriptor.m);
}
