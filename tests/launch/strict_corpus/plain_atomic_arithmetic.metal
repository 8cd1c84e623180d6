#include <metal_stdlib>
using namespace metal;

kernel void k(device atomic_uint* counter [[buffer(0)]]) {
  *counter += 1;  // error: compile
}
