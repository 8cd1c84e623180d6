// Primitives in the Metal language, shared by prelude/metal.h and prelude/host.h: the host launcher
// runs Metal source, so the two differ only in how loops are unrolled and a tile product is computed.
//
// Every name here has the same meaning in prelude/cuda.h. Words that a kernel file uses directly:
//   LILY_DEVICE, LILY_CONSTANT, LILY_THREADGROUP, LILY_THREAD   address space of a pointer
//   LILY_TABLE                                                  a constant array at file scope
//   LILY_THREADGROUP_ARRAY(type, name, count)                   in a body only; 16-byte aligned
// and one that the launcher puts before a body: LILY_ABSENT(name), an optional input that a call leaves out.

#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>

using namespace metal;

#define LILY_DEVICE device
#define LILY_CONSTANT constant
#define LILY_THREADGROUP threadgroup
#define LILY_THREAD thread
#define LILY_TABLE constant const
#define LILY_RESTRICT
#define LILY_INLINE inline __attribute__((always_inline))
#define LILY_INFINITY INFINITY
#define LILY_THREADGROUP_ARRAY(type, name, count) alignas(16) threadgroup type name[count]
#define LILY_ABSENT(name) const device bool* const name = nullptr

using f32 = float;
using fp16 = half;
using bf16 = bfloat;
using i64 = long;
using u64 = ulong;
using i32 = int;
using u32 = uint;
using u16 = ushort;
using u8 = uchar;

// ---- numbers ---------------------------------------------------------------------------------------

template <typename T>
LILY_INLINE f32 lily_to_f32(T x) {
  return static_cast<f32>(x);
}

// Rounds to nearest, ties to even.
template <typename T>
LILY_INLINE T lily_from_f32(f32 x) {
  return static_cast<T>(x);
}

LILY_INLINE f32 lily_f32_from_bits(u32 bits) {
  return as_type<f32>(bits);
}

LILY_INLINE u32 lily_bits_from_f32(f32 x) {
  return as_type<u32>(x);
}

// Two 16-bit floats in one word, the first in the low half.
template <typename T>
LILY_INLINE u32 lily_pack2(f32 low, f32 high) {
  return u32(as_type<u16>(T(low))) | (u32(as_type<u16>(T(high))) << 16);
}

template <typename T>
LILY_INLINE f32 lily_unpack2_low(u32 word) {
  return static_cast<f32>(as_type<T>(u16(word & 0xffffu)));
}

template <typename T>
LILY_INLINE f32 lily_unpack2_high(u32 word) {
  return static_cast<f32>(as_type<T>(u16(word >> 16)));
}

// The i-th 4-bit (8-bit) field of a word, from the low end: affine-quantised weights.
LILY_INLINE f32 lily_nibble_f32(u32 word, int i) {
  return static_cast<f32>((word >> (4 * i)) & 0xfu);
}

LILY_INLINE f32 lily_byte_f32(u32 word, int i) {
  return static_cast<f32>((word >> (8 * i)) & 0xffu);
}

LILY_INLINE u32 lily_popcount(u32 x) {
  return popcount(x);
}

LILY_INLINE f32 lily_fma(f32 a, f32 b, f32 c) {
  return fma(a, b, c);
}

template <typename T>
LILY_INLINE T lily_max(T a, T b) {
  return max(a, b);
}

template <typename T>
LILY_INLINE T lily_min(T a, T b) {
  return min(a, b);
}

LILY_INLINE f32 lily_exp(f32 x) {
  return precise::exp(x);
}

LILY_INLINE f32 lily_log(f32 x) {
  return precise::log(x);
}

LILY_INLINE f32 lily_cos(f32 x) {
  return precise::cos(x);
}

LILY_INLINE f32 lily_sin(f32 x) {
  return precise::sin(x);
}

LILY_INLINE f32 lily_rsqrt(f32 x) {
  return precise::rsqrt(x);
}

LILY_INLINE f32 lily_fast_exp(f32 x) {
  return fast::exp(x);
}

LILY_INLINE f32 lily_fast_exp2(f32 x) {
  return fast::exp2(x);
}

LILY_INLINE f32 lily_fast_log(f32 x) {
  return fast::log(x);
}

LILY_INLINE f32 lily_fast_rsqrt(f32 x) {
  return fast::rsqrt(x);
}

// ---- vector loads and stores -----------------------------------------------------------------------
// lily_vec<T, N> holds N elements as they lie in memory, in words of up to 16 bytes. The address must be
// a multiple of min(16, N * sizeof(T)) bytes.

template <int BYTES>
struct lily_detail_word;
template <>
struct lily_detail_word<2> {
  using type = ushort;
};
template <>
struct lily_detail_word<4> {
  using type = uint;
};
template <>
struct lily_detail_word<8> {
  using type = uint2;
};
template <>
struct lily_detail_word<16> {
  using type = uint4;
};

template <typename T, int N>
struct lily_vec {
  enum : int {
    BYTES = N * int(sizeof(T)),
    PART_BYTES = BYTES < 16 ? BYTES : 16,
    PARTS = BYTES / PART_BYTES,
    WORDS_PER_PART = PART_BYTES < 4 ? 1 : PART_BYTES / 4
  };
  using part_type = typename lily_detail_word<PART_BYTES>::type;
  static_assert(int(PARTS) * int(PART_BYTES) == int(BYTES), "N * sizeof(T) must be 2, 4, 8 or a multiple of 16");
  part_type parts[PARTS];
};

LILY_INLINE u32 lily_detail_get(ushort part, int) {
  return part;
}
LILY_INLINE u32 lily_detail_get(uint part, int) {
  return part;
}
LILY_INLINE u32 lily_detail_get(uint2 part, int i) {
  return part[i];
}
LILY_INLINE u32 lily_detail_get(uint4 part, int i) {
  return part[i];
}
LILY_INLINE void lily_detail_set(thread ushort& part, int, u32 word) {
  part = ushort(word);
}
LILY_INLINE void lily_detail_set(thread uint& part, int, u32 word) {
  part = word;
}
LILY_INLINE void lily_detail_set(thread uint2& part, int i, u32 word) {
  part[i] = word;
}
LILY_INLINE void lily_detail_set(thread uint4& part, int i, u32 word) {
  part[i] = word;
}

template <int N, typename T>
LILY_INLINE lily_vec<T, N> lily_load(const device T* source) {
  using part_type = typename lily_vec<T, N>::part_type;
  lily_vec<T, N> vec;
  LILY_UNROLL
  for (int i = 0; i < lily_vec<T, N>::PARTS; ++i) {
    vec.parts[i] = reinterpret_cast<const device part_type*>(source)[i];
  }
  return vec;
}

template <int N, typename T>
LILY_INLINE lily_vec<T, N> lily_load(const threadgroup T* source) {
  using part_type = typename lily_vec<T, N>::part_type;
  lily_vec<T, N> vec;
  LILY_UNROLL
  for (int i = 0; i < lily_vec<T, N>::PARTS; ++i) {
    vec.parts[i] = reinterpret_cast<const threadgroup part_type*>(source)[i];
  }
  return vec;
}

template <int N, typename T>
LILY_INLINE void lily_store(device T* target, lily_vec<T, N> vec) {
  using part_type = typename lily_vec<T, N>::part_type;
  LILY_UNROLL
  for (int i = 0; i < lily_vec<T, N>::PARTS; ++i) {
    reinterpret_cast<device part_type*>(target)[i] = vec.parts[i];
  }
}

template <int N, typename T>
LILY_INLINE void lily_store(threadgroup T* target, lily_vec<T, N> vec) {
  using part_type = typename lily_vec<T, N>::part_type;
  LILY_UNROLL
  for (int i = 0; i < lily_vec<T, N>::PARTS; ++i) {
    reinterpret_cast<threadgroup part_type*>(target)[i] = vec.parts[i];
  }
}

// The i-th 32-bit word of the vector.
template <typename T, int N>
LILY_INLINE u32 lily_word(lily_vec<T, N> vec, int i) {
  return lily_detail_get(vec.parts[i / lily_vec<T, N>::WORDS_PER_PART], i % lily_vec<T, N>::WORDS_PER_PART);
}

template <typename T, int N>
LILY_INLINE void lily_unpack(lily_vec<T, N> vec, thread f32* out) {
  if constexpr (sizeof(T) == 4) {
    LILY_UNROLL
    for (int i = 0; i < N; ++i) {
      out[i] = static_cast<f32>(as_type<T>(lily_word(vec, i)));
    }
  } else {
    static_assert(sizeof(T) == 2, "lily_unpack: 16-bit or 32-bit elements");
    LILY_UNROLL
    for (int i = 0; i < N; ++i) {
      const u32 word = lily_word(vec, i / 2);
      out[i] = i % 2 == 0 ? lily_unpack2_low<T>(word) : lily_unpack2_high<T>(word);
    }
  }
}

template <typename T, int N>
LILY_INLINE lily_vec<T, N> lily_pack(const thread f32* values) {
  lily_vec<T, N> vec;
  constexpr int per_part = lily_vec<T, N>::WORDS_PER_PART;
  if constexpr (sizeof(T) == 4) {
    LILY_UNROLL
    for (int i = 0; i < N; ++i) {
      lily_detail_set(vec.parts[i / per_part], i % per_part, as_type<u32>(T(values[i])));
    }
  } else if constexpr (N == 1) {
    lily_detail_set(vec.parts[0], 0, as_type<u16>(T(values[0])));
  } else {
    LILY_UNROLL
    for (int i = 0; i < N / 2; ++i) {
      lily_detail_set(vec.parts[i / per_part], i % per_part, lily_pack2<T>(values[2 * i], values[2 * i + 1]));
    }
  }
  return vec;
}

// ---- simdgroups: 32 lanes, all of them active --------------------------------------------------------

template <typename T>
LILY_INLINE T lily_simd_sum(T x) {
  return simd_sum(x);
}

template <typename T>
LILY_INLINE T lily_simd_max(T x) {
  return simd_max(x);
}

template <typename T>
LILY_INLINE T lily_simd_min(T x) {
  return simd_min(x);
}

// Sum over the lanes before this one.
template <typename T>
LILY_INLINE T lily_simd_prefix_sum(T x) {
  return simd_prefix_exclusive_sum(x);
}

template <typename T>
LILY_INLINE T lily_shuffle(T x, u32 lane) {
  return simd_shuffle(x, ushort(lane));
}

template <typename T>
LILY_INLINE T lily_shuffle_xor(T x, u32 lane_mask) {
  return simd_shuffle_xor(x, ushort(lane_mask));
}

template <typename T>
LILY_INLINE T lily_shuffle_down(T x, u32 delta) {
  return simd_shuffle_down(x, ushort(delta));
}

template <typename T>
LILY_INLINE T lily_broadcast_first(T x) {
  return simd_broadcast_first(x);
}

LILY_INLINE bool lily_simd_any(bool x) {
  return simd_any(x);
}

LILY_INLINE bool lily_simd_all(bool x) {
  return simd_all(x);
}

// Bit i is lane i's value.
LILY_INLINE u32 lily_ballot(bool x) {
  return u32(static_cast<simd_vote::vote_t>(simd_ballot(x)));
}

// ---- barriers and atomics --------------------------------------------------------------------------

// Orders the simdgroup's threadgroup memory.
LILY_INLINE void lily_simdgroup_barrier() {
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Orders the threadgroup's threadgroup memory.
LILY_INLINE void lily_threadgroup_barrier() {
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Orders device memory, too, among the threads of one threadgroup.
LILY_INLINE void lily_threadgroup_barrier_device() {
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
}

// Relaxed; returns the value before the addition.
LILY_INLINE u32 lily_atomic_add(device u32* target, u32 value) {
  return atomic_fetch_add_explicit(reinterpret_cast<device atomic_uint*>(target), value, memory_order_relaxed);
}
LILY_INLINE i32 lily_atomic_add(device i32* target, i32 value) {
  return atomic_fetch_add_explicit(reinterpret_cast<device atomic_int*>(target), value, memory_order_relaxed);
}
LILY_INLINE u32 lily_atomic_add(threadgroup u32* target, u32 value) {
  return atomic_fetch_add_explicit(reinterpret_cast<threadgroup atomic_uint*>(target), value, memory_order_relaxed);
}
LILY_INLINE i32 lily_atomic_add(threadgroup i32* target, i32 value) {
  return atomic_fetch_add_explicit(reinterpret_cast<threadgroup atomic_int*>(target), value, memory_order_relaxed);
}
