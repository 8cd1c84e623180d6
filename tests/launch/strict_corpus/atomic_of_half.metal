#include <metal_stdlib>
using namespace metal;

struct Counters {
  atomic<half> total;  // error: atomic-type
};

kernel void k(device Counters* x [[buffer(0)]]) {
  atomic_store_explicit(&x->total, half(1), memory_order_relaxed);
}
