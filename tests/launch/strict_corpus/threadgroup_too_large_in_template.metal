#include <metal_stdlib>
using namespace metal;

template <typename T, int ROWS, int COLUMNS>
[[kernel]] void k(device T* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup T tile[ROWS * (COLUMNS + 8)];  // error: threadgroup-memory
  tile[i % 32] = x[i];
  x[i] = tile[0];
}

template [[host_name("k_float_64_128")]] [[kernel]] decltype(k<float, 64, 128>) k<float, 64, 128>;
