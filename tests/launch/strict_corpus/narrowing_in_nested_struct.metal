#include <metal_stdlib>
using namespace metal;

struct S {
  int a;
  float b;
};

struct Outer {
  S inner;
  int c;
};

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  Outer o = {{int(i), i}, i};  // error: compile
  x[i] = o.inner.a;
}
