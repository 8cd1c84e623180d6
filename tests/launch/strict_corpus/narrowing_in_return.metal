#include <metal_stdlib>
using namespace metal;

struct S {
  int a;
  int b;
};

inline S made(uint a) {
  return {a, 1};  // error: compile
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = made(i).a;
}
