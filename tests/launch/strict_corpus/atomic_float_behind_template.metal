#include <metal_stdlib>
using namespace metal;

template <typename T>
struct Cell {
  atomic<T> value;
};

inline void add(threadgroup uint* where, float value) {
  auto cell = reinterpret_cast<threadgroup Cell<float>*>(where);
  atomic_fetch_add_explicit(&cell->value, value, memory_order_relaxed);  // error: atomic-float
}

kernel void k(
    device float* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  threadgroup float shared[32];
  add(reinterpret_cast<threadgroup uint*>(shared), x[i]);
  x[i] = shared[0];
}
