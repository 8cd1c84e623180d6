#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup float a[4096];
  threadgroup float b[4096];
  threadgroup float c[4];  // error: threadgroup-memory
  a[i % 32] = b[i % 32] = c[i % 4] = x[i];
}
