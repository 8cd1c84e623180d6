#include <metal_stdlib>
using namespace metal;

kernel void k(
    device uint* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  wchar_t c = 65;  // error: type
  x[i] = c;
}
