// Atomics. A launch runs on one OS thread and GPU threads switch only at collectives, so plain reads and
// writes are atomic between them; every memory order is the strongest one.
#pragma once
#pragma clang system_header

#include "simd.h"

namespace metal {

template <typename T>
struct atomic {
  using value_type = T;
  T __s;
};

} // namespace metal

namespace lily {
// The atomic object types of an address space: A is `atomic<T>` with the pointer's qualifiers.
template <typename A>
using atomic_value = typename plain<A>::value_type;
} // namespace lily

namespace metal {

template <typename A>
LILY_RT_INLINE void atomic_store_explicit(
    A* object,
    lily::atomic_value<A> desired,
    memory_order = memory_order_relaxed,
    thread_scope = thread_scope_device) {
  object->__s = desired;
}
template <typename A>
LILY_RT_INLINE auto atomic_load_explicit(const A* object, memory_order = memory_order_relaxed,
                                 thread_scope = thread_scope_device) {
  lily::atomic_value<A> value = object->__s;
  return value;
}
template <typename A>
LILY_RT_INLINE auto atomic_exchange_explicit(
    A* object,
    lily::atomic_value<A> desired,
    memory_order = memory_order_relaxed,
    thread_scope = thread_scope_device) {
  lily::atomic_value<A> old = object->__s;
  object->__s = desired;
  return old;
}
// Compares bits, so that a NaN equals itself.
template <typename A, typename E>
LILY_RT_INLINE bool atomic_compare_exchange_weak_explicit(
    A* object,
    E* expected,
    lily::atomic_value<A> desired,
    memory_order,
    memory_order,
    thread_scope = thread_scope_device) {
  lily::atomic_value<A> old = object->__s, wanted = *expected;
  if (__builtin_memcmp(&old, &wanted, sizeof(old)) == 0) {
    object->__s = desired;
    return true;
  }
  *expected = old;
  return false;
}
#define LILY_FETCH(name, result) \
  template <typename A> \
  LILY_WRAPS LILY_RT_INLINE auto atomic_fetch_##name##_explicit( \
      A* object, \
      lily::atomic_value<A> x, \
      memory_order = memory_order_relaxed, \
      thread_scope = thread_scope_device) { \
    using T = lily::atomic_value<A>; \
    T old = object->__s; \
    object->__s = T(result); \
    return old; \
  }
LILY_FETCH(add, old + x)
LILY_FETCH(sub, old - x)
LILY_FETCH(and, old & x)
LILY_FETCH(or, old | x)
LILY_FETCH(xor, old ^ x)
LILY_FETCH(min, x < old ? x : old)
LILY_FETCH(max, old < x ? x : old)
#undef LILY_FETCH
// The forms without a result, for 64-bit integers.
template <typename A>
LILY_RT_INLINE void atomic_min_explicit(
    A* object,
    lily::atomic_value<A> x,
    memory_order order = memory_order_relaxed) {
  atomic_fetch_min_explicit(object, x, order);
}
template <typename A>
LILY_RT_INLINE void atomic_max_explicit(
    A* object,
    lily::atomic_value<A> x,
    memory_order order = memory_order_relaxed) {
  atomic_fetch_max_explicit(object, x, order);
}
LILY_RT_INLINE void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}

} // namespace metal

typedef metal::atomic<int> atomic_int;
typedef metal::atomic<uint> atomic_uint;
typedef metal::atomic<ulong> atomic_ulong;
typedef metal::atomic<bool> atomic_bool;
typedef metal::atomic<float> atomic_float;
namespace metal {
using ::atomic_bool;
using ::atomic_float;
using ::atomic_int;
using ::atomic_uint;
using ::atomic_ulong;
} // namespace metal
