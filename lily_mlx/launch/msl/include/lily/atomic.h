// Atomics. A launch runs on one OS thread and GPU threads switch only at collectives, so plain reads and
// writes are atomic between them; every memory order is the strongest one.
#pragma once
#pragma clang system_header

#include "simd.h"

namespace metal {

template <typename T>
struct atomic {
#ifdef LILY_STRICT
  static_assert(__is_same(T, int) || __is_same(T, uint) || __is_same(T, bool) || __is_same(T, float) ||
                    __is_same(T, ulong),
                "lily atomic-type");
  atomic() = default;
  atomic(const atomic&) = delete;
  template <typename From>
    requires(lily::Elsewhere<From, atomic>)
  atomic(const From&) = delete;
  atomic& operator=(const atomic&) = delete;
#endif
  using value_type = T;
  T __s;
};

} // namespace metal

namespace lily {
// The atomic object types of an address space: A is `atomic<T>` with the pointer's qualifiers.
template <typename A>
using atomic_value = typename plain<A>::value_type;
#ifdef LILY_STRICT
// A is where atomics can be: in device or threadgroup memory, and in device memory alone for a float. The
// functions that change a value know int and uint, and add and sub float as well.
#define LILY_ATOMIC(A, ...) \
  static_assert(lily::in_device<A> || lily::in_threadgroup<A>, "lily atomic-space"); \
  static_assert(lily::in_device<A> || !__is_same(lily::atomic_value<A>, float), "lily atomic-float"); \
  static_assert(__VA_ARGS__, "lily atomic-type");
#else
#define LILY_ATOMIC(A, ...)
#endif
} // namespace lily

namespace metal {

template <typename A>
LILY_RT_INLINE void atomic_store_explicit(
    A* object,
    lily::atomic_value<A> desired,
    memory_order = memory_order_relaxed,
    thread_scope = thread_scope_device) {
  LILY_ATOMIC(A, true)
  object->__s = desired;
}
template <typename A>
LILY_RT_INLINE auto atomic_load_explicit(const A* object, memory_order = memory_order_relaxed,
                                 thread_scope = thread_scope_device) {
  LILY_ATOMIC(A, true)
  lily::atomic_value<A> value = object->__s;
  return value;
}
template <typename A>
LILY_RT_INLINE auto atomic_exchange_explicit(
    A* object,
    lily::atomic_value<A> desired,
    memory_order = memory_order_relaxed,
    thread_scope = thread_scope_device) {
  LILY_ATOMIC(A, true)
  lily::atomic_value<A> old = object->__s;
  object->__s = desired;
  return old;
}
// Compares bits, so that a NaN equals itself.
template <typename A>
LILY_RT_INLINE bool atomic_compare_exchange_weak_explicit(
    A* object,
    lily::atomic_value<A>* expected,
    lily::atomic_value<A> desired,
    memory_order,
    memory_order,
    thread_scope = thread_scope_device) {
  LILY_ATOMIC(A, true)
  lily::atomic_value<A> old = object->__s;
  if (__builtin_memcmp(&old, expected, sizeof(old)) == 0) {
    object->__s = desired;
    return true;
  }
  *expected = old;
  return false;
}
#define LILY_FETCH(name, result, of_float) \
  template <typename A> \
  LILY_WRAPS LILY_RT_INLINE auto atomic_fetch_##name##_explicit( \
      A* object, \
      lily::atomic_value<A> x, \
      memory_order = memory_order_relaxed, \
      thread_scope = thread_scope_device) { \
    using T = lily::atomic_value<A>; \
    LILY_ATOMIC(A, !__is_same(T, bool) && (of_float || !__is_same(T, float))) \
    T old = object->__s; \
    object->__s = T(result); \
    return old; \
  }
LILY_FETCH(add, old + x, true)
LILY_FETCH(sub, old - x, true)
LILY_FETCH(and, old & x, false)
LILY_FETCH(or, old | x, false)
LILY_FETCH(xor, old ^ x, false)
LILY_FETCH(min, x < old ? x : old, false)
LILY_FETCH(max, old < x ? x : old, false)
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

#undef LILY_ATOMIC

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
