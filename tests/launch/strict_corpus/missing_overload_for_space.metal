#include <metal_stdlib>
using namespace metal;

inline float sum4(device const float* p) {
  return p[0] + p[1] + p[2] + p[3];
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup float tile[4];
  tile[i % 4] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x[i] = sum4(tile);  // error: address-space
}
