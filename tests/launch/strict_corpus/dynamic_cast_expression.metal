#include <metal_stdlib>
using namespace metal;

struct Base {
  float value;
};

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  Base base{x[i]};
  thread Base* p = dynamic_cast<thread Base*>(&base);  // error: rtti
  x[i] = p->value;
}
