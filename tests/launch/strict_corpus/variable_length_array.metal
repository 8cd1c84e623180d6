#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], constant int& n [[buffer(1)]]) {
  float values[n];  // error: vla
  values[0] = x[0];
  x[1] = values[0];
}
