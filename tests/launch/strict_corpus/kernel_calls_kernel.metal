#include <metal_stdlib>
using namespace metal;

kernel void fill(device float* x [[buffer(0)]]) {
  x[0] = 1.0f;
}

kernel void k(device float* x [[buffer(0)]]) {
  fill(x);  // error: kernel-call
}
