#include <metal_stdlib>
using namespace metal;

int rows = 4;  // error: program-scope

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = float(rows);
}
