#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup float tile[32];
  tile[i % 32] = x[i];
  threadgroup_barrier();  // error: overload
  x[i] = tile[31 - i % 32];
}
