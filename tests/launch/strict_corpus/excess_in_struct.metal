#include <metal_stdlib>
using namespace metal;

struct S {
  int a;
  float b;
};

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  S s = {1, 2, 3};  // error: compile
  x[i] = s.b;
}
