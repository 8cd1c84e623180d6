#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]],
              uint i [[thread_position_in_gird]]) {  // error: attribute
  x[i] = 0.0f;
}
