#include <metal_stdlib>
using namespace metal;

kernel void k(device uint* x [[buffer(0)]], device atomic_uint* counts [[buffer(1)]]) {
  atomic_uint count = counts[1];  // error: compile
  x[0] = 1;
}
