#include <metal_stdlib>
using namespace metal;

struct Pair {
  float a, b;
};

kernel void k(
    device float2* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  Pair p = Pair(x[i].x, x[i].y);  // error: aggregate
  x[i] = float2(p.b, p.a);
}
