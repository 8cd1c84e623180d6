#include <metal_stdlib>
using namespace metal;

kernel void k(device atomic_int* count [[buffer(0)]], device int* old [[buffer(1)]]) {
  int expected = 0;
  atomic_compare_exchange_weak_explicit(count, &expected, 1, memory_order_relaxed, memory_order_relaxed);
  atomic_compare_exchange_weak_explicit(count, old, 1, memory_order_relaxed, memory_order_relaxed);  // error: overload
}
