#include <metal_stdlib>
using namespace metal;

struct S {
  static int f(int n) {
    return n ? S::f(n - 1) : 0;  // error: recursion
  }
  int g(int n) thread {
    return n ? this->g(n - 1) : 0;  // error: recursion
  }
  int operator()(int n) thread {
    return n ? (*this)(n - 1) : 0;  // error: recursion
  }
};
struct R {
  int g(int n) thread {
    return n ? g(n - 1) : 0;  // error: recursion
  }
};

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  S s;
  R r;
  x[i] = S::f(3) + s.g(3) + s(3) + r.g(2);
}
