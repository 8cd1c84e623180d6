#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]]) {
  simdgroup_float8x8 m;
  simdgroup_load(m, x, 8, ulong2(0, 0), true);
  simdgroup_load(m, x, 8, 0, 0, true);  // error: overload
  simdgroup_store(m, x);
}
