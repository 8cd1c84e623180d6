#include <metal_stdlib>
using namespace metal;

struct S {
  int a;
  half b;
};

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  S s = {i, 2};  // error: compile
  S t{x[i], 2};  // error: compile
  S u = {1, x[i]};  // error: compile
  S v[2] = {{1, 2}, {i, 2}};  // error: compile
  x[i] = s.a + t.a + u.b + v[1].a;
}
