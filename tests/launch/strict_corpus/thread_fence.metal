#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = 0.0f;
  atomic_thread_fence(mem_flags::mem_device, memory_order_relaxed);  // error: metal-version
}
