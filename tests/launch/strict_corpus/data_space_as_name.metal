#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  int ray_data = int(i), rays = 1;  // error: keyword
  float object_data = 2;  // error: keyword
  x[i] = ray_data * object_data + rays;
}
