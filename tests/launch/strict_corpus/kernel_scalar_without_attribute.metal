#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]],
              uint i) {  // error: attribute
  x[i] = 0.0f;
}
