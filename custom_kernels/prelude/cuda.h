// The prelude for NVIDIA GPUs: a warp is a simdgroup, a block is a threadgroup, __shared__ is threadgroup
// memory. Compiled by NVRTC or nvcc; launch/cuda.py, or MLX, has already included cuda_bf16.h and cuda_fp16.h.
// Meanings are those of prelude/msl.h.

#define LILY_DEVICE
#define LILY_CONSTANT
#define LILY_THREADGROUP
#define LILY_THREAD
#define LILY_TABLE static __device__ const
#define LILY_RESTRICT __restrict__
#define LILY_INLINE __device__ __forceinline__
#define LILY_UNROLL _Pragma("unroll")
#define LILY_NO_UNROLL _Pragma("unroll 1")
#define LILY_INFINITY __int_as_float(0x7f800000)
#define LILY_THREADGROUP_ARRAY(type, name, count) __shared__ __align__(16) type name[count]
#define LILY_ABSENT(name) const bool* const name = nullptr

// The thread attributes that a body names; on Metal they are parameters that MLX adds.
#define thread_position_in_grid \
  make_uint3(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z)
#define thread_position_in_threadgroup make_uint3(threadIdx.x, threadIdx.y, threadIdx.z)
#define threadgroup_position_in_grid make_uint3(blockIdx.x, blockIdx.y, blockIdx.z)
#define threads_per_threadgroup make_uint3(blockDim.x, blockDim.y, blockDim.z)
#define threadgroups_per_grid make_uint3(gridDim.x, gridDim.y, gridDim.z)
#define thread_index_in_threadgroup \
  (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))
#define thread_index_in_simdgroup (thread_index_in_threadgroup % 32u)
#define simdgroup_index_in_threadgroup (thread_index_in_threadgroup / 32u)

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;

using f32 = float;
using fp16 = __half;
using bf16 = __nv_bfloat16;
using i64 = long long;
using u64 = unsigned long long;
using i32 = int;
using u32 = unsigned int;
using u16 = unsigned short;
using u8 = unsigned char;

// ---- numbers ---------------------------------------------------------------------------------------

template <typename T>
LILY_INLINE f32 lily_to_f32(T x) {
  return static_cast<f32>(x);
}

template <typename T>
struct lily_detail_float {
  static LILY_INLINE T detail_from_f32(f32 x) {
    return static_cast<T>(x);
  }
};

template <>
struct lily_detail_float<bf16> {
  static LILY_INLINE bf16 detail_from_f32(f32 x) {
    return __float2bfloat16_rn(x);
  }
  static LILY_INLINE u32 detail_pack2(f32 low, f32 high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const u32*>(&pair);
  }
  static LILY_INLINE f32 detail_low(u32 word) {
    return __uint_as_float(word << 16);
  }
  static LILY_INLINE f32 detail_high(u32 word) {
    return __uint_as_float(word & 0xffff0000u);
  }
};

template <>
struct lily_detail_float<fp16> {
  static LILY_INLINE fp16 detail_from_f32(f32 x) {
    return __float2half_rn(x);
  }
  static LILY_INLINE u32 detail_pack2(f32 low, f32 high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const u32*>(&pair);
  }
  static LILY_INLINE f32 detail_low(u32 word) {
    return __half2float(__ushort_as_half(u16(word & 0xffffu)));
  }
  static LILY_INLINE f32 detail_high(u32 word) {
    return __half2float(__ushort_as_half(u16(word >> 16)));
  }
};

template <typename T>
LILY_INLINE T lily_from_f32(f32 x) {
  return lily_detail_float<T>::detail_from_f32(x);
}

LILY_INLINE f32 lily_f32_from_bits(u32 bits) {
  return __uint_as_float(bits);
}

LILY_INLINE u32 lily_bits_from_f32(f32 x) {
  return __float_as_uint(x);
}

template <typename T>
LILY_INLINE u32 lily_pack2(f32 low, f32 high) {
  return lily_detail_float<T>::detail_pack2(low, high);
}

template <typename T>
LILY_INLINE f32 lily_unpack2_low(u32 word) {
  return lily_detail_float<T>::detail_low(word);
}

template <typename T>
LILY_INLINE f32 lily_unpack2_high(u32 word) {
  return lily_detail_float<T>::detail_high(word);
}

// Conversions run at a quarter of the rate of additions, so the field becomes the low mantissa bits of 2^23.
LILY_INLINE f32 lily_nibble_f32(u32 word, int i) {
  return __uint_as_float(((word >> (4 * i)) & 0xfu) | 0x4b000000u) - 8388608.0f;
}

LILY_INLINE f32 lily_byte_f32(u32 word, int i) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u | u32(i))) - 8388608.0f;
}

LILY_INLINE u32 lily_popcount(u32 x) {
  return __popc(x);
}

LILY_INLINE f32 lily_fma(f32 a, f32 b, f32 c) {
  return __fmaf_rn(a, b, c);
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
  return expf(x);
}

LILY_INLINE f32 lily_log(f32 x) {
  return logf(x);
}

LILY_INLINE f32 lily_cos(f32 x) {
  return cosf(x);
}

LILY_INLINE f32 lily_sin(f32 x) {
  return sinf(x);
}

LILY_INLINE f32 lily_rsqrt(f32 x) {
  return rsqrtf(x);
}

LILY_INLINE f32 lily_fast_exp(f32 x) {
  return __expf(x);
}

LILY_INLINE f32 lily_fast_exp2(f32 x) {
  f32 y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

LILY_INLINE f32 lily_fast_log(f32 x) {
  return __logf(x);
}

LILY_INLINE f32 lily_fast_rsqrt(f32 x) {
  f32 y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- vector loads and stores -----------------------------------------------------------------------

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
  return i == 0 ? part.x : part.y;
}
LILY_INLINE u32 lily_detail_get(uint4 part, int i) {
  return i == 0 ? part.x : i == 1 ? part.y : i == 2 ? part.z : part.w;
}
LILY_INLINE void lily_detail_set(ushort& part, int, u32 word) {
  part = ushort(word);
}
LILY_INLINE void lily_detail_set(uint& part, int, u32 word) {
  part = word;
}
LILY_INLINE void lily_detail_set(uint2& part, int i, u32 word) {
  (i == 0 ? part.x : part.y) = word;
}
LILY_INLINE void lily_detail_set(uint4& part, int i, u32 word) {
  (i == 0 ? part.x : i == 1 ? part.y : i == 2 ? part.z : part.w) = word;
}

template <int N, typename T>
LILY_INLINE lily_vec<T, N> lily_load(const T* source) {
  using part_type = typename lily_vec<T, N>::part_type;
  lily_vec<T, N> vec;
  LILY_UNROLL
  for (int i = 0; i < lily_vec<T, N>::PARTS; ++i) {
    vec.parts[i] = reinterpret_cast<const part_type*>(source)[i];
  }
  return vec;
}

template <int N, typename T>
LILY_INLINE void lily_store(T* target, lily_vec<T, N> vec) {
  using part_type = typename lily_vec<T, N>::part_type;
  LILY_UNROLL
  for (int i = 0; i < lily_vec<T, N>::PARTS; ++i) {
    reinterpret_cast<part_type*>(target)[i] = vec.parts[i];
  }
}

template <typename T, int N>
LILY_INLINE u32 lily_word(lily_vec<T, N> vec, int i) {
  return lily_detail_get(vec.parts[i / lily_vec<T, N>::WORDS_PER_PART], i % lily_vec<T, N>::WORDS_PER_PART);
}

template <typename T, int N>
LILY_INLINE void lily_unpack(lily_vec<T, N> vec, f32* out) {
  if constexpr (sizeof(T) == 4) {
    LILY_UNROLL
    for (int i = 0; i < N; ++i) {
      const u32 word = lily_word(vec, i);
      out[i] = static_cast<f32>(*reinterpret_cast<const T*>(&word));
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
LILY_INLINE lily_vec<T, N> lily_pack(const f32* values) {
  lily_vec<T, N> vec;
  constexpr int per_part = lily_vec<T, N>::WORDS_PER_PART;
  if constexpr (sizeof(T) == 4) {
    LILY_UNROLL
    for (int i = 0; i < N; ++i) {
      const T value = static_cast<T>(values[i]);
      lily_detail_set(vec.parts[i / per_part], i % per_part, *reinterpret_cast<const u32*>(&value));
    }
  } else if constexpr (N == 1) {
    lily_detail_set(vec.parts[0], 0, lily_pack2<T>(values[0], 0.0f));
  } else {
    LILY_UNROLL
    for (int i = 0; i < N / 2; ++i) {
      lily_detail_set(vec.parts[i / per_part], i % per_part, lily_pack2<T>(values[2 * i], values[2 * i + 1]));
    }
  }
  return vec;
}

// ---- simdgroups: 32 lanes, all of them active --------------------------------------------------------
// Reductions are the ascending xor butterfly, the order of the host launcher.

template <typename T>
LILY_INLINE T lily_simd_sum(T x) {
  LILY_UNROLL
  for (int mask = 1; mask < 32; mask *= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, mask);
  }
  return x;
}

template <typename T>
LILY_INLINE T lily_simd_max(T x) {
  LILY_UNROLL
  for (int mask = 1; mask < 32; mask *= 2) {
    x = max(x, __shfl_xor_sync(0xffffffffu, x, mask));
  }
  return x;
}

template <typename T>
LILY_INLINE T lily_simd_min(T x) {
  LILY_UNROLL
  for (int mask = 1; mask < 32; mask *= 2) {
    x = min(x, __shfl_xor_sync(0xffffffffu, x, mask));
  }
  return x;
}

template <typename T>
LILY_INLINE T lily_simd_prefix_sum(T x) {
  const u32 lane = thread_index_in_simdgroup;
  T sum = x;
  LILY_UNROLL
  for (int delta = 1; delta < 32; delta *= 2) {
    const T before = __shfl_up_sync(0xffffffffu, sum, delta);
    sum = lane >= u32(delta) ? sum + before : sum;
  }
  const T exclusive = __shfl_up_sync(0xffffffffu, sum, 1);
  return lane == 0 ? T(0) : exclusive;
}

template <typename T>
LILY_INLINE T lily_shuffle(T x, u32 lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}

template <typename T>
LILY_INLINE T lily_shuffle_xor(T x, u32 lane_mask) {
  return __shfl_xor_sync(0xffffffffu, x, lane_mask);
}

template <typename T>
LILY_INLINE T lily_shuffle_down(T x, u32 delta) {
  return __shfl_down_sync(0xffffffffu, x, delta);
}

template <typename T>
LILY_INLINE T lily_broadcast_first(T x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

LILY_INLINE bool lily_simd_any(bool x) {
  return __any_sync(0xffffffffu, x);
}

LILY_INLINE bool lily_simd_all(bool x) {
  return __all_sync(0xffffffffu, x);
}

LILY_INLINE u32 lily_ballot(bool x) {
  return __ballot_sync(0xffffffffu, x);
}

// ---- barriers and atomics --------------------------------------------------------------------------

LILY_INLINE void lily_simdgroup_barrier() {
  __syncwarp();
}

LILY_INLINE void lily_threadgroup_barrier() {
  __syncthreads();
}

// A block barrier orders device memory among its threads as well.
LILY_INLINE void lily_threadgroup_barrier_device() {
  __syncthreads();
}

LILY_INLINE u32 lily_atomic_add(u32* target, u32 value) {
  return atomicAdd(target, value);
}
LILY_INLINE i32 lily_atomic_add(i32* target, i32 value) {
  return atomicAdd(target, value);
}

// ---- tile products ---------------------------------------------------------------------------------

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
LILY_INLINE void lily_detail_ldmatrix(u32 (&words)[4], const void* row) {
  const u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

LILY_INLINE void lily_detail_ldmatrix_transposed(u32 (&words)[4], const void* row) {
  const u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

LILY_INLINE void lily_detail_mma(f32* c, const u32* a, const u32* b, bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

LILY_INLINE void lily_detail_mma(f32* c, const u32* a, const u32* b, fp16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// One simdgroup's C [M, N] fp32 += A [M, K] x B, A and B of type T in threadgroup memory; M, N, K multiples
// of 16, rows 16-byte aligned. Each lane holds ELEMENTS values; values[2 * j] and values[2 * j + 1] are
// neighbours in one row, the first in an even column.
//
// mma.sync 16 x 8 x 16 on tensor cores; fp32 operands are multiplied by loops in fp32. Row strides that are
// an odd multiple of 16 bytes read without bank conflicts.
template <typename T, int M, int N>
struct lily_tile {
  static_assert(M % 16 == 0 && N % 16 == 0, "tile sides are multiples of 16");
  enum : int { FRAGMENT_COLS = N / 8, FRAGMENT_ROWS = M / 16, ELEMENTS = M * N / 32 };
  f32 values[ELEMENTS];

  static LILY_INLINE int row(int element, u32 lane) {
    return (element / 4) / FRAGMENT_COLS * 16 + element / 2 % 2 * 8 + int(lane / 4);
  }
  static LILY_INLINE int col(int element, u32 lane) {
    return (element / 4) % FRAGMENT_COLS * 8 + int(lane % 4) * 2 + element % 2;
  }

  LILY_INLINE void zero() {
    LILY_UNROLL
    for (int i = 0; i < ELEMENTS; ++i) {
      values[i] = 0.0f;
    }
  }

  // B [N, K]: C += A B^T.
  template <int K>
  LILY_INLINE void multiply_nt(const T* a, int a_stride, const T* b, int b_stride, u32 lane) {
    if constexpr (sizeof(T) == 2) {
      detail_multiply<K, false>(a, a_stride, b, b_stride, lane);
    } else {
      detail_loops<K>(a, a_stride, b, 1, b_stride, lane);
    }
  }

  // B [K, N]: C += A B.
  template <int K>
  LILY_INLINE void multiply_nn(const T* a, int a_stride, const T* b, int b_stride, u32 lane) {
    if constexpr (sizeof(T) == 2) {
      detail_multiply<K, true>(a, a_stride, b, b_stride, lane);
    } else {
      detail_loops<K>(a, a_stride, b, b_stride, 1, lane);
    }
  }

  template <int K, bool B_IS_KN>
  LILY_INLINE void detail_multiply(const T* a, int a_stride, const T* b, int b_stride, u32 lane) {
    static_assert(K % 16 == 0, "K is a multiple of 16");
    // Matrices 0 to 3 of A: (rows 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15); of B: (cols 0-7, k 0-7),
    // (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
    const int row_in_16 = int(lane % 16);
    const int half = int(lane / 16) * 8;
    const int row_in_8 = int(lane % 8);
    const int odd_matrix = int(lane / 8 % 2) * 8;
    a += row_in_16 * a_stride + half;
    b += B_IS_KN ? (row_in_8 + odd_matrix) * b_stride + half : (row_in_8 + half) * b_stride + odd_matrix;
    LILY_UNROLL
    for (int k = 0; k < K; k += 16) {
      u32 a_words[FRAGMENT_ROWS][4];
      u32 b_words[FRAGMENT_COLS / 2][4];
      LILY_UNROLL
      for (int i = 0; i < FRAGMENT_ROWS; ++i) {
        lily_detail_ldmatrix(a_words[i], a + i * 16 * a_stride + k);
      }
      LILY_UNROLL
      for (int j = 0; j < FRAGMENT_COLS / 2; ++j) {
        if constexpr (B_IS_KN) {
          lily_detail_ldmatrix_transposed(b_words[j], b + k * b_stride + j * 16);
        } else {
          lily_detail_ldmatrix(b_words[j], b + j * 16 * b_stride + k);
        }
      }
      LILY_UNROLL
      for (int i = 0; i < FRAGMENT_ROWS; ++i) {
        LILY_UNROLL
        for (int j = 0; j < FRAGMENT_COLS; ++j) {
          lily_detail_mma(values + (i * FRAGMENT_COLS + j) * 4, a_words[i], b_words[j / 2] + j % 2 * 2, T());
        }
      }
    }
  }

  template <int K>
  LILY_INLINE void detail_loops(
      const T* a, int a_stride, const T* b, int b_k_stride, int b_n_stride, u32 lane) {
    static_assert(K % 16 == 0, "K is a multiple of 16");
    for (int k = 0; k < K; ++k) {
      LILY_UNROLL
      for (int i = 0; i < ELEMENTS; ++i) {
        values[i] = lily_fma(
            lily_to_f32(a[row(i, lane) * a_stride + k]),
            lily_to_f32(b[k * b_k_stride + col(i, lane) * b_n_stride]),
            values[i]);
      }
    }
  }
};

// ---- tile products with quantised matrices -----------------------------------------------------------
// Meanings are those of prelude/host.h.
//
// 16-bit operands. A lane holds STEP / 4 neighbouring numbers of a row of B, so an mma.sync of 16 columns takes two
// pairs of each of four lanes: not neighbouring columns, but a sum over k has no order. A's tile is laid out to match:
// of a row, chunk q of 16 bytes holds pair q of all four, the pairs being 0 4, 1 5, 2 6, 3 7 and the same plus
// multiples of 8, in which a word's 4-bit numbers come apart two at a time. Chunks are permuted by the row, so that
// neither put() nor ldmatrix meets a bank twice.
template <typename T, int STEP>
struct lily_packed_left {
  static LILY_INLINE void put(T* a, int row, int chunk, lily_vec<T, 8> values) {
    if constexpr (sizeof(T) == 2) {
      const uint4 v = values.parts[0];
      const u32 pairs[4] = {
          __byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
          __byte_perm(v.y, v.w, 0x7632)};
      constexpr int words_per_lane = STEP / 32;
      u32* words = reinterpret_cast<u32*>(a + row * STEP) + chunk / words_per_lane;
      LILY_UNROLL
      for (int i = 0; i < 4; ++i) {
        words[detail_chunk(chunk % words_per_lane * 4 + i, row) * 4] = pairs[i];
      }
    } else {
      lily_store(a + row * STEP + chunk * 8, values);
    }
  }

  static LILY_INLINE int detail_chunk(int chunk, int row) {
    return chunk ^ (row & 7) ^ (chunk / 8 * 2);
  }
};

// x & mask | value in one instruction, which the compiler does not make of two constants.
LILY_INLINE u32 lily_detail_and_or(u32 x, u32 mask, u32 value) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(x), "r"(mask), "r"(value));
  return result;
}

template <typename T>
struct lily_detail_pair;
template <>
struct lily_detail_pair<bf16> {
  using type = __nv_bfloat162;
  enum : u32 { MAGIC = 0x43004300u };  // 128: the last bit of its significand is 1
};
template <>
struct lily_detail_pair<fp16> {
  using type = __half2;
  enum : u32 { MAGIC = 0x64006400u };  // 1024
};

template <typename A, typename B>
struct lily_detail_same {
  enum : bool { VALUE = false };
};
template <typename A>
struct lily_detail_same<A, A> {
  enum : bool { VALUE = true };
};

// Lane l holds, of each fragment of 8 rows, row l / 4 and of it STEP / 4 columns from STEP / 4 * (l % 4) on.
template <typename T, typename ScaleT, int N, int BITS, int GROUP, int STEP>
struct lily_packed_right {
  static_assert(N % 16 == 0 && (BITS == 4 || BITS == 8) && GROUP % 32 == 0, "N % 16, 4 or 8 bits, groups of 32 i");
  static_assert(STEP == 64 || STEP == 128, "64 or 128 columns");
  enum : int { FRAGMENTS = N / 8, WORDS = BITS * STEP / 128 };
  lily_vec<u32, WORDS> words[FRAGMENTS];
  ScaleT scales[FRAGMENTS];
  ScaleT biases[FRAGMENTS];

  LILY_INLINE void load(
      const u32* first_words, const ScaleT* first_scales, const ScaleT* first_biases, int row_columns,
      int first_column, int row_count, u32 lane) {
    // What changes from step to step is the same in all lanes, so addresses are sums of one and the other.
    const int own = int(lane % 4);
    const u32* words_at = first_words + first_column / (32 / BITS);
    const int step_group = first_column / GROUP;
    LILY_UNROLL
    for (int f = 0; f < FRAGMENTS; ++f) {
      const int row = lily_min(f * 8 + int(lane / 4), row_count - 1);
      words[f] = lily_load<WORDS>(words_at + (row * (row_columns / (32 / BITS)) + own * WORDS));
      const int group = row * (row_columns / GROUP) + (GROUP < STEP ? own * (STEP / 4) / GROUP : 0);
      scales[f] = (first_scales + step_group)[group];
      biases[f] = (first_biases + step_group)[group];
    }
  }

  // This lane's numbers 8 * part to 8 * part + 7 in fragment f, in pairs of T: 0 4, 1 5, 2 6, 3 7.
  LILY_INLINE void detail_expand(int f, int part, u32* pairs) const {
    if constexpr (BITS == 4 && lily_detail_same<T, ScaleT>::VALUE) {
      using pair = typename lily_detail_pair<T>::type;
      const u32 word = lily_word(words[f], part);
      const u32 magic = lily_detail_pair<T>::MAGIC;
      const pair start = *reinterpret_cast<const pair*>(&magic);
      const pair scale = {scales[f], scales[f]};
      const pair bias = {biases[f], biases[f]};
      LILY_UNROLL
      for (int i = 0; i < 4; ++i) {
        const u32 bits = lily_detail_and_or(word >> (4 * i), 0x000f000fu, magic);
        // The difference is exact, so that each number is rounded once.
        const pair numbers = __hfma2(__hsub2(*reinterpret_cast<const pair*>(&bits), start), scale, bias);
        pairs[i] = *reinterpret_cast<const u32*>(&numbers);
      }
    } else {
      const f32 scale = lily_to_f32(scales[f]);
      const f32 bias = lily_to_f32(biases[f]);
      LILY_UNROLL
      for (int i = 0; i < 4; ++i) {
        f32 low;
        f32 high;
        if constexpr (BITS == 4) {
          low = lily_nibble_f32(lily_word(words[f], part), i);
          high = lily_nibble_f32(lily_word(words[f], part), i + 4);
        } else {
          low = lily_byte_f32(lily_word(words[f], 2 * part), i);
          high = lily_byte_f32(lily_word(words[f], 2 * part + 1), i);
        }
        pairs[i] = lily_pack2<T>(lily_fma(low, scale, bias), lily_fma(high, scale, bias));
      }
    }
  }
};

// fp32 has no tensor cores here: the matrix stays in memory.
template <typename ScaleT, int N, int BITS, int GROUP, int STEP>
struct lily_packed_right<f32, ScaleT, N, BITS, GROUP, STEP> {
  const u32* weights;
  const ScaleT* scales;
  const ScaleT* biases;
  int columns;
  int column;
  int rows;

  LILY_INLINE void load(
      const u32* first_words, const ScaleT* first_scales, const ScaleT* first_biases, int row_columns,
      int first_column, int row_count, u32 lane) {
    weights = first_words;
    scales = first_scales;
    biases = first_biases;
    columns = row_columns;
    column = first_column;
    rows = row_count;
  }

  LILY_INLINE f32 detail_number(int n, int k) const {
    const int row = lily_min(n, rows - 1);
    k += column;
    const u32 word = weights[(row * columns + k) / (32 / BITS)];
    const f32 number = static_cast<f32>((word >> (k % (32 / BITS) * BITS)) & ((1u << BITS) - 1u));
    const int group = row * (columns / GROUP) + k / GROUP;
    return lily_fma(number, lily_to_f32(scales[group]), lily_to_f32(biases[group]));
  }
};

template <int COUNT, typename T, typename ScaleT, int M, int N, int BITS, int GROUP, int STEP>
LILY_INLINE void lily_multiply_packed(
    lily_tile<T, M, N>* c, const T* a, const lily_packed_right<T, ScaleT, N, BITS, GROUP, STEP>* b, u32 lane) {
  if constexpr (sizeof(T) == 2) {
    using Left = lily_packed_left<T, STEP>;
    enum : int { ROW_FRAGMENTS = M / 16, COL_FRAGMENTS = N / 8 };
    // Matrices 0 to 3: (rows 0-7, chunk q), (rows 8-15, q), (rows 0-7, q + 1), (rows 8-15, q + 1).
    const T* rows = a + int(lane % 16) * STEP;
    LILY_UNROLL
    for (int part = 0; part < STEP / 32; ++part) {
      u32 b_words[COUNT][COL_FRAGMENTS][4];
      LILY_UNROLL
      for (int t = 0; t < COUNT; ++t) {
        LILY_UNROLL
        for (int f = 0; f < COL_FRAGMENTS; ++f) {
          b[t].detail_expand(f, part, b_words[t][f]);
        }
      }
      LILY_UNROLL
      for (int q = 0; q < 4; q += 2) {
        const T* chunk = rows + (int(lane / 16) ^ Left::detail_chunk(part * 4 + q, int(lane % 8))) * 8;
        LILY_UNROLL
        for (int i = 0; i < ROW_FRAGMENTS; ++i) {
          u32 a_words[4];
          lily_detail_ldmatrix(a_words, chunk + i * 16 * STEP);
          LILY_UNROLL
          for (int t = 0; t < COUNT; ++t) {
            LILY_UNROLL
            for (int f = 0; f < COL_FRAGMENTS; ++f) {
              lily_detail_mma(c[t].values + (i * COL_FRAGMENTS + f) * 4, a_words, b_words[t][f] + q, T());
            }
          }
        }
      }
    }
  } else {
    for (int k = 0; k < STEP; ++k) {
      LILY_UNROLL
      for (int t = 0; t < COUNT; ++t) {
        LILY_UNROLL
        for (int i = 0; i < lily_tile<T, M, N>::ELEMENTS; ++i) {
          const int row = lily_tile<T, M, N>::row(i, lane);
          const int col = lily_tile<T, M, N>::col(i, lane);
          c[t].values[i] = lily_fma(a[row * STEP + k], b[t].detail_number(col, k), c[t].values[i]);
        }
      }
    }
  }
}
