#include <metal_stdlib>
using namespace metal;

kernel void k(
    device float* x [[buffer(0)]],
    uint width [[thread_execution_width]],
    uint size [[threads_per_simdgroup]]) {  // error: attribute
  x[width] = size;
}
