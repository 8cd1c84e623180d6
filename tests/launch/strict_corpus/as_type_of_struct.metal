#include <metal_stdlib>
using namespace metal;

struct Word {
  uint bits;
};
kernel void k(device float* x [[buffer(0)]]) {
  Word word{1};
  x[0] = as_type<float>(word);  // error: overload
}
