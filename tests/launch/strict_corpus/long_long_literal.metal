#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = float(ulong(i) * 6364136223846793005ULL);  // error: long-long
}
