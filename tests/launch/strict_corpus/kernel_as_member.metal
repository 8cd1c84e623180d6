#include <metal_stdlib>
using namespace metal;

struct Window {
  int kernel, stride;  // error: keyword
};

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  Window w{3, 1};
  x[i] = w.stride;
}
