#include <metal_stdlib>
using namespace metal;

struct Pair {
  float a, b;
};

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  vec<Pair, 2> v;  // error: type
  x[i] = v[0].a;
}
