#include <metal_stdlib>
using namespace metal;

using namespace std;  // error: std-namespace

kernel void k(device float* x [[buffer(0)]]) {
  x[0] = 0.0f;
}
