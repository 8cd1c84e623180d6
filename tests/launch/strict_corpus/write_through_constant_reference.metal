#include <metal_stdlib>
using namespace metal;

struct Sizes {
  int rows;
  int columns;
};

kernel void k(constant Sizes& sizes [[buffer(0)]], device float* x [[buffer(1)]]) {
  sizes.rows += 1;  // error: read-only
  x[0] = float(sizes.rows);
}
