#include <metal_stdlib>
using namespace metal;

inline float twice(auto value) {  // error: cxx-version
  return 2 * value;
}

kernel void k(
    device float* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = twice(x[i]);
}
