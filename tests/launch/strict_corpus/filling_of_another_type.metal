#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  x[lane] = simd_shuffle_and_fill_up(x[lane], 0, 1);  // error: overload
}
