#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  float tile[64] = {x[i]};
  simdgroup_float8x8 m;
  simdgroup_load(m, tile, 8);  // error: matrix-pointer
  simdgroup_store(m, x, 8);
}
