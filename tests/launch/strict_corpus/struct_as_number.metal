#include <metal_stdlib>
using namespace metal;

struct S {
  float a;
  float b;
};
inline float of(float v) {
  return v;
}
inline float loaded(const device S* d) {
  return *d;  // error: compile
}

kernel void k(device S* d [[buffer(0)]], constant S& c [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  float f = d[i];  // error: compile
  float g = c;  // error: compile
  f = d[i];  // error: compile
  d[i].a = f + g + of(d[i]);  // error: compile
}
