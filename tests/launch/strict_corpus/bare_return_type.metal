#include <metal_stdlib>
using namespace metal;

struct Row {
  float values[4];
  const float& at(int j) {  // error: address-space
    return values[j];
  }
};

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  Row row;
  row.values[0] = x[i];
  x[i] = row.values[0];
}
