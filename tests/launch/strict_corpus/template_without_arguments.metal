#include <metal_stdlib>
using namespace metal;

template <typename T>
struct Pair {
  T a, b;
  Pair(T x, T y) : a(x), b(y) {}
};
kernel void k(device float* x [[buffer(0)]]) {
  Pair<float> right(1, 2);
  Pair pair(x[0], x[1]);  // error: cxx-version
  x[0] = pair.a + right.b;
}
