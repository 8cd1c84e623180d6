#include <metal_stdlib>
using namespace metal;

struct Activation {
  virtual float apply(float x) {  // error: virtual
    return x;
  }
};

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  Activation activation;
  x[i] = activation.apply(x[i]);
}
