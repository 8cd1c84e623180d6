#include <metal_stdlib>
using namespace metal;

struct Shape {
  int rows, columns;
};
template <Shape shape>  // error: cxx-version
inline int size() {
  return shape.rows * shape.columns;
}
kernel void k(device int* x [[buffer(0)]]) {
  x[0] = 1;
}
