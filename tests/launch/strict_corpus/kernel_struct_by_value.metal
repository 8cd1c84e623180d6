#include <metal_stdlib>
using namespace metal;

struct Sizes {
  uint rows;
};

kernel void k(
    device float* x [[buffer(0)]],
    Sizes sizes [[buffer(1)]],  // error: attribute
    uint i [[thread_position_in_grid]]) {
  x[i] = sizes.rows;
}
