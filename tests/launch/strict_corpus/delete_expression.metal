#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  thread float* none = nullptr;
  delete none;  // error: new-delete
  x[i] = 0.0f;
}
