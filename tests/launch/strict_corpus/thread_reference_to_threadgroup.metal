#include <metal_stdlib>
using namespace metal;

template <typename T, int N>
inline T sum(const thread T& first) {
  T total = 0;
  for (int j = 0; j < N; ++j) {
    total += first;
  }
  return total;
}

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup float tile[32];
  tile[i % 32] = x[i];
  x[i] = sum<float, 4>(tile[0]);  // error: address-space
}
