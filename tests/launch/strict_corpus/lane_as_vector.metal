#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float* x [[buffer(0)]],
    uint2 lane [[thread_index_in_simdgroup]]) {  // error: attribute-type
  x[lane.x] = 0.0f;
}
