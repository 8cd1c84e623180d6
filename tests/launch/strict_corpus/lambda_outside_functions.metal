#include <metal_stdlib>
using namespace metal;

constant auto square = [](float v) { return v * v; };  // error: lambda
kernel void k(device float* x [[buffer(0)]]) {
  x[0] = square(x[0]);
}
