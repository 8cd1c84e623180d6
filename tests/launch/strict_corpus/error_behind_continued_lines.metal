#include <metal_stdlib>
using namespace metal;

/* A comment
   of two lines. */
#define SUM(a, b) \
  ((a) + \
   (b))

kernel void k(device float* x [[buffer(0)]],
              uint i [[thread_position_in_grid]]) {
  x[i] = SUM(
    x[i],
    1
  )
    + absent;  // error: undeclared
}
