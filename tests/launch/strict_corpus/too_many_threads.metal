#include <metal_stdlib>
using namespace metal;

[[kernel, max_total_threads_per_threadgroup(2048)]] void k(  // error: threads
    device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = 1.0f;
}
