// Simdgroup and quadgroup functions, barriers.
//
// Every function is one rendezvous of the simdgroup's active lanes (hostrt/runtime.h), keyed by the
// function's name and the line of the call: `line` is a default argument everywhere. A reduction is the
// ascending xor butterfly (1, 2, 4, 8, 16). A read from a lane that took no part ends the launch.
#pragma once
#pragma clang system_header

#include "math.h"

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16,
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(uint(a) | uint(b));
}
constexpr mem_flags operator&(mem_flags a, mem_flags b) {
  return mem_flags(uint(a) & uint(b));
}

enum memory_order : int {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst,
};

enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
};

LILY_RT_INLINE void threadgroup_barrier(mem_flags, int line = __builtin_LINE()) {
  lily::rt::threadgroup_barrier(line);
}
LILY_RT_INLINE void threadgroup_barrier(mem_flags, memory_order, thread_scope = thread_scope_threadgroup,
                                int line = __builtin_LINE()) {
  lily::rt::threadgroup_barrier(line);
}
LILY_RT_INLINE void simdgroup_barrier(mem_flags, int line = __builtin_LINE()) {
  lily::rt::simdgroup_barrier(line);
}

// The lanes for which a predicate held.
class simd_vote {
 public:
  using vote_t = ulong;
  explicit constexpr simd_vote(vote_t v = 0) : bits(v) {}
  explicit constexpr operator vote_t() const {
    return bits;
  }
  constexpr bool all() const {
    return (bits & 0xffffffffu) == 0xffffffffu;
  }
  constexpr bool any() const {
    return bits != 0;
  }

 private:
  vote_t bits;
};
class quad_vote {
 public:
  using vote_t = uint;
  explicit constexpr quad_vote(vote_t v = 0) : bits(v) {}
  explicit constexpr operator vote_t() const {
    return bits;
  }
  constexpr bool all() const {
    return (bits & 15u) == 15u;
  }
  constexpr bool any() const {
    return bits != 0;
  }

 private:
  vote_t bits;
};

} // namespace metal

namespace lily {

#ifdef LILY_STRICT
// Metal exchanges integers and reals of up to 32 bits, and vectors of them; no bool.
template <typename T>
constexpr bool is_exchanged = is_scalar<T> && !__is_same(T, bool) && sizeof(T) <= 4;
template <typename T>
concept Exchanged = is_exchanged<element_t<T>>;
template <typename T>
concept ExchangedBits = Exchanged<T> && bool(__is_integral(element_t<T>));
// What fills up a T is one.
template <typename F, typename T>
concept Fills = bool(__is_same(plain<F>, plain<T>));
#else
template <typename T>
concept Exchanged = is_scalar<T> || Vector<T>;
template <typename T>
concept ExchangedBits = Exchanged<T>;
template <typename F, typename T>
concept Fills = bool(__is_convertible(F, T));
#endif

// The type a reduction runs in: its overloads have no bool (which promotes to int) and no bfloat (to float).
template <typename T>
constexpr auto promoted(T x) {
  if constexpr (__is_same(T, bool)) {
    return int(x);
  } else if constexpr (__is_same(T, bfloat)) {
    return float(x);
  } else {
    return x;
  }
}

struct sum {
  template <typename T>
  LILY_WRAPS static T of(T a, T b) {
    return T(a + b);
  }
};
struct product {
  template <typename T>
  LILY_WRAPS static T of(T a, T b) {
    return T(a * b);
  }
};
struct minimum {
  template <typename T>
  static T of(T a, T b) {
    return T(metal::min(a, b));
  }
};
struct maximum {
  template <typename T>
  static T of(T a, T b) {
    return T(metal::max(a, b));
  }
};
struct bit_and {
  template <typename T>
  static T of(T a, T b) {
    return T(a & b);
  }
};
struct bit_or {
  template <typename T>
  static T of(T a, T b) {
    return T(a | b);
  }
};
struct bit_xor {
  template <typename T>
  static T of(T a, T b) {
    return T(a ^ b);
  }
};

// Each group of W lanes (32: the simdgroup, 4: its quads) reduced; lanes that are not active are left out.
// Pairs of neighbours, then pairs of those, and so on: what the ascending butterfly leaves in every lane.
template <int W, typename Op, typename T>
void reduce_groups(T* v, rt::u32 active) {
  T pairs[32];
  uint present = active;
  for (int i = 0; i < 32; ++i) {
    pairs[i] = v[i];
  }
  for (int n = 16; n >= 32 / W; n /= 2) {
    if (active == 0xffffffffu) {
      for (int i = 0; i < n; ++i) {
        pairs[i] = Op::of(pairs[2 * i], pairs[2 * i + 1]);
      }
    } else {
      uint either = 0;
      for (int i = 0; i < n; ++i) {
        uint has = (present >> (2 * i)) & 3;
        pairs[i] = has == 3 ? Op::of(pairs[2 * i], pairs[2 * i + 1]) : pairs[2 * i + (has == 2)];
        either |= uint(has != 0) << i;
      }
      present = either;
    }
  }
  for (int i = 0; i < 32; ++i) {
    v[i] = pairs[i / W];
  }
}
// Running value over the active lanes of each group, in lane order.
template <int W, typename Op, bool inclusive, typename T>
void scan_groups(T* v, rt::u32 active) {
  for (int base = 0; base < 32; base += W) {
    T running = __is_same(Op, product) ? T(1) : T(0);
    for (int i = base; i < base + W; ++i) {
      if ((active >> i) & 1) {
        T next = Op::of(running, v[i]);
        v[i] = inclusive ? next : running;
        running = next;
      }
    }
  }
}
template <int W, typename Op, typename T>
auto reduce(rt::Op name, T x, int line) {
  auto mine = promoted(x);
  return rt::simd_combine<decltype(mine)>(name, line, mine, reduce_groups<W, Op, decltype(mine)>);
}
template <int W, typename Op, bool inclusive, typename T>
auto scan(rt::Op name, T x, int line) {
  auto mine = promoted(x);
  return rt::simd_combine<decltype(mine)>(name, line, mine, scan_groups<W, Op, inclusive, decltype(mine)>);
}

[[noreturn]] __attribute__((noinline, cold)) inline void inactive_read(rt::Op name, int from, int line) {
  char text[128];
  int n = 0;
  auto say = [&](const char* s) {
    while (*s != 0 && n < 120) {
      text[n++] = *s++;
    }
  };
  auto number = [&](int x) {
    const char digits[3] = {char('0' + x / 10 % 10), char('0' + x % 10), 0};
    say(x < 10 ? digits + 1 : digits);
  };
  say(name);
  say(": lane ");
  number(int(rt::lane()));
  if (from < 0 || from > 31) {
    say(" reads beyond its simdgroup");
  } else {
    say(" reads lane ");
    number(from);
    say(", which is not active");
  }
  text[n] = 0;
  rt::fault(rt::Kind::inactive_lane, line, text);
}

// The value of lane `from`. All lanes meet before any of them may fail.
template <typename T>
T read_lane(rt::Op name, T x, int from, int line) {
  uint active = 0;
  const T* all = rt::simd_gather(name, line, x, active);
  if (from < 0 || from > 31 || !((active >> from) & 1)) {
    inactive_read(name, from, line);
  }
  return all[from];
}
// Lane `from` of data, or of filling when `filled`.
template <typename T>
T read_lane_or_fill(rt::Op name, T data, T filling, bool filled, int from, int line) {
  struct Pair {
    T data, filling;
  };
  uint active = 0;
  const Pair* all = rt::simd_gather(name, line, Pair{data, filling}, active);
  if (from < 0 || from > 31 || !((active >> from) & 1)) {
    inactive_read(name, from, line);
  }
  return filled ? all[from].filling : all[from].data;
}
LILY_RT_INLINE uint active_lanes(rt::Op name, bool mine, int line, uint& active) {
  const bool* all = rt::simd_gather(name, line, mine, active);
  uint votes = 0;
  for (int i = 0; i < 32; ++i) {
    votes |= uint(((active >> i) & 1) && all[i]) << i;
  }
  return votes;
}

// The 32 lanes as groups of W: position in the group and the group's first lane.
template <int W>
struct position {
  int lane = int(rt::lane());
  int at = lane % W;
  int base = lane - at;
};
template <int W, typename T>
T shuffle_up(rt::Op name, T data, int delta, int line) {
  position<W> p;
  return read_lane(name, data, p.at >= delta ? p.lane - delta : p.lane, line);
}
template <int W, typename T>
T shuffle_down(rt::Op name, T data, int delta, int line) {
  position<W> p;
  return read_lane(name, data, p.at + delta < W ? p.lane + delta : p.lane, line);
}
template <int W, typename T>
T shuffle_xor(rt::Op name, T data, int mask, int line) {
  position<W> p;
  return read_lane(name, data, p.base + (p.at ^ mask), line);
}
template <int W, typename T>
T rotate(rt::Op name, T data, int by, int line) {
  position<W> p;
  return read_lane(name, data, p.base + ((p.at + by) % W + W) % W, line);
}
// Shifts inside blocks of `modulo` lanes; what falls off the end comes from the other end of filling.
template <typename T>
T fill_up(rt::Op name, T data, T filling, int delta, int modulo, int line) {
  int lane = int(rt::lane()), at = lane % modulo;
  bool filled = at < delta;
  return read_lane_or_fill(name, data, filling, filled, lane - delta + (filled ? modulo : 0), line);
}
template <typename T>
T fill_down(rt::Op name, T data, T filling, int delta, int modulo, int line) {
  int lane = int(rt::lane()), at = lane % modulo;
  bool filled = at + delta >= modulo;
  return read_lane_or_fill(name, data, filling, filled, lane + delta - (filled ? modulo : 0), line);
}

} // namespace lily

namespace metal {

#define LILY_GROUP_REDUCTION(name, W, op, exchanged) \
  template <lily::exchanged T> \
  LILY_RT_INLINE auto name(T x, int line = __builtin_LINE()) { \
    return lily::reduce<W, lily::op>(#name, x, line); \
  }
#define LILY_GROUP_SCAN(name, W, op, inclusive) \
  template <lily::Exchanged T> \
  LILY_RT_INLINE auto name(T x, int line = __builtin_LINE()) { \
    return lily::scan<W, lily::op, inclusive>(#name, x, line); \
  }
#define LILY_GROUP(group, W) \
  LILY_GROUP_REDUCTION(group##_sum, W, sum, Exchanged) \
  LILY_GROUP_REDUCTION(group##_product, W, product, Exchanged) \
  LILY_GROUP_REDUCTION(group##_min, W, minimum, Exchanged) \
  LILY_GROUP_REDUCTION(group##_max, W, maximum, Exchanged) \
  LILY_GROUP_REDUCTION(group##_and, W, bit_and, ExchangedBits) \
  LILY_GROUP_REDUCTION(group##_or, W, bit_or, ExchangedBits) \
  LILY_GROUP_REDUCTION(group##_xor, W, bit_xor, ExchangedBits) \
  LILY_GROUP_SCAN(group##_prefix_inclusive_sum, W, sum, true) \
  LILY_GROUP_SCAN(group##_prefix_exclusive_sum, W, sum, false) \
  LILY_GROUP_SCAN(group##_prefix_inclusive_product, W, product, true) \
  LILY_GROUP_SCAN(group##_prefix_exclusive_product, W, product, false) \
  template <lily::Exchanged T> \
  LILY_RT_INLINE T group##_shuffle(T data, ushort lane, int line = __builtin_LINE()) { \
    return lily::read_lane(#group "_shuffle", data, lily::position<W>().base + lane, line); \
  } \
  template <lily::Exchanged T> \
  LILY_RT_INLINE T group##_broadcast(T data, ushort lane, int line = __builtin_LINE()) { \
    return lily::read_lane(#group "_broadcast", data, lily::position<W>().base + lane, line); \
  } \
  template <lily::Exchanged T> \
  LILY_RT_INLINE T group##_shuffle_up(T data, ushort delta, int line = __builtin_LINE()) { \
    return lily::shuffle_up<W>(#group "_shuffle_up", data, delta, line); \
  } \
  template <lily::Exchanged T> \
  LILY_RT_INLINE T group##_shuffle_down(T data, ushort delta, int line = __builtin_LINE()) { \
    return lily::shuffle_down<W>(#group "_shuffle_down", data, delta, line); \
  } \
  template <lily::Exchanged T> \
  LILY_RT_INLINE T group##_shuffle_xor(T data, ushort mask, int line = __builtin_LINE()) { \
    return lily::shuffle_xor<W>(#group "_shuffle_xor", data, mask, line); \
  } \
  template <lily::Exchanged T> \
  LILY_RT_INLINE T group##_shuffle_rotate_up(T data, ushort delta, int line = __builtin_LINE()) { \
    return lily::rotate<W>(#group "_shuffle_rotate_up", data, -int(delta), line); \
  } \
  template <lily::Exchanged T> \
  LILY_RT_INLINE T group##_shuffle_rotate_down(T data, ushort delta, int line = __builtin_LINE()) { \
    return lily::rotate<W>(#group "_shuffle_rotate_down", data, delta, line); \
  } \
  template <lily::Exchanged T, lily::Fills<T> F> \
  LILY_RT_INLINE T group##_shuffle_and_fill_up( \
      T data, \
      F filling, \
      ushort delta, \
      ushort modulo = W, \
      int line = __builtin_LINE()) { \
    return lily::fill_up<T>(#group "_shuffle_and_fill_up", data, filling, delta, modulo, line); \
  } \
  template <lily::Exchanged T, lily::Fills<T> F> \
  LILY_RT_INLINE T group##_shuffle_and_fill_down( \
      T data, \
      F filling, \
      ushort delta, \
      ushort modulo = W, \
      int line = __builtin_LINE()) { \
    return lily::fill_down<T>(#group "_shuffle_and_fill_down", data, filling, delta, modulo, line); \
  } \
  LILY_RT_INLINE group##_vote group##_ballot(bool mine, int line = __builtin_LINE()) { \
    uint active = 0; \
    uint votes = lily::active_lanes(#group "_ballot", mine, line, active); \
    return group##_vote((votes >> lily::position<W>().base) & (0xffffffffu >> (32 - W))); \
  } \
  LILY_RT_INLINE group##_vote group##_active_threads_mask(int line = __builtin_LINE()) { \
    uint active = 0; \
    lily::active_lanes(#group "_active_threads_mask", true, line, active); \
    return group##_vote((active >> lily::position<W>().base) & (0xffffffffu >> (32 - W))); \
  } \
  LILY_RT_INLINE bool group##_all(bool mine, int line = __builtin_LINE()) { \
    uint active = 0; \
    uint misses = lily::active_lanes(#group "_all", !mine, line, active); \
    return ((misses >> lily::position<W>().base) & (0xffffffffu >> (32 - W))) == 0; \
  } \
  LILY_RT_INLINE bool group##_any(bool mine, int line = __builtin_LINE()) { \
    uint active = 0; \
    uint hits = lily::active_lanes(#group "_any", mine, line, active); \
    return ((hits >> lily::position<W>().base) & (0xffffffffu >> (32 - W))) != 0; \
  } \
  LILY_RT_INLINE bool group##_is_first(int line = __builtin_LINE()) { \
    uint active = 0; \
    lily::active_lanes(#group "_is_first", true, line, active); \
    lily::position<W> p; \
    return p.at == __builtin_ctz((active >> p.base) & (0xffffffffu >> (32 - W))); \
  } \
  template <lily::Exchanged T> \
  LILY_RT_INLINE T group##_broadcast_first(T data, int line = __builtin_LINE()) { \
    uint active = 0; \
    const T* all = lily::rt::simd_gather(#group "_broadcast_first", line, data, active); \
    int base = lily::position<W>().base; \
    return all[base + __builtin_ctz((active >> base) & (0xffffffffu >> (32 - W)))]; \
  } \
  LILY_RT_INLINE bool group##_is_helper_thread() { \
    return false; \
  }
LILY_GROUP(simd, 32)
LILY_GROUP(quad, 4)
#undef LILY_GROUP
#undef LILY_GROUP_REDUCTION
#undef LILY_GROUP_SCAN

} // namespace metal

// The compiler's own names, which MLX's bfloat overloads and its matrix tiles call.
template <typename T>
LILY_RT_INLINE T __metal_get_thread_index_in_simdgroup(T) {
  return T(lily::rt::lane());
}
template <typename T>
LILY_RT_INLINE T __metal_get_simdgroup_size(T) {
  return T(32);
}
template <typename T>
LILY_RT_INLINE T __metal_get_simdgroup_index_in_threadgroup(T) {
  return T(lily::rt::thread().simdgroup_index_in_threadgroup);
}
LILY_RT_INLINE float __metal_simd_xor(float x, int line = __builtin_LINE()) {
  return as_type<float>(metal::simd_xor(as_type<uint>(x), line));
}
#define LILY_BUILTIN_1(name) \
  template <typename T> \
  LILY_RT_INLINE auto __metal_##name(T x, int line = __builtin_LINE()) { \
    return metal::name(x, line); \
  }
#define LILY_BUILTIN_2(name) \
  template <typename T> \
  LILY_RT_INLINE T __metal_##name(T x, ushort by, int line = __builtin_LINE()) { \
    return metal::name(x, by, line); \
  }
#define LILY_BUILTIN_4(name) \
  template <typename T> \
  LILY_RT_INLINE T __metal_##name(T x, T filling, ushort by, ushort modulo, int line = __builtin_LINE()) { \
    return metal::name(x, filling, by, modulo, line); \
  }
LILY_BUILTIN_1(simd_sum)
LILY_BUILTIN_1(simd_product)
LILY_BUILTIN_1(simd_min)
LILY_BUILTIN_1(simd_max)
LILY_BUILTIN_1(simd_and)
LILY_BUILTIN_1(simd_or)
LILY_BUILTIN_1(simd_xor)
LILY_BUILTIN_1(simd_prefix_inclusive_sum)
LILY_BUILTIN_1(simd_prefix_exclusive_sum)
LILY_BUILTIN_1(simd_prefix_inclusive_product)
LILY_BUILTIN_1(simd_prefix_exclusive_product)
LILY_BUILTIN_1(simd_broadcast_first)
LILY_BUILTIN_2(simd_broadcast)
LILY_BUILTIN_2(simd_shuffle)
LILY_BUILTIN_2(simd_shuffle_up)
LILY_BUILTIN_2(simd_shuffle_down)
LILY_BUILTIN_2(simd_shuffle_xor)
LILY_BUILTIN_2(simd_shuffle_rotate_up)
LILY_BUILTIN_2(simd_shuffle_rotate_down)
LILY_BUILTIN_4(simd_shuffle_and_fill_up)
LILY_BUILTIN_4(simd_shuffle_and_fill_down)
#undef LILY_BUILTIN_1
#undef LILY_BUILTIN_2
#undef LILY_BUILTIN_4
