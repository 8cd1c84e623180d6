#include <metal_stdlib>
using namespace metal;

struct Loader {
  const float* source;  // error: address-space
  int stride;
};

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  Loader loader;
  loader.stride = 4;
  x[i] = float(loader.stride);
}
