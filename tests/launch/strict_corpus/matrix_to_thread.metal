#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  float tile[64];
  simdgroup_float8x8 m;
  simdgroup_load(m, x, 8);
  simdgroup_store(m, tile, 8);  // error: matrix-pointer
  x[i] = tile[0];
}
