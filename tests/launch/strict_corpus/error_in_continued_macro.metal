#include <metal_stdlib>
using namespace metal;

#define STORE(p, v) \
  auto stored = (v); \
  p = stored.absent

kernel void k(device float2* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = 0;

  STORE(x[i], float2(1));  // error: undeclared
}
