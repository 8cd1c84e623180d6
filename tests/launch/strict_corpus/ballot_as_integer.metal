#include <metal_stdlib>
using namespace metal;

kernel void k(device uint* x [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  uint mask = uint(ulong(simd_ballot(x[lane] > 2)));
  x[lane] = mask + popcount(simd_ballot(x[lane] > 3));  // error: overload
}
