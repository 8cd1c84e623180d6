#include <metal_stdlib>
using namespace metal;

struct Counter {
  uint value;
  void bump() {
    value += 1;
  }
};

kernel void k(device Counter* counters [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  counters[i].bump();  // error: address-space
}
