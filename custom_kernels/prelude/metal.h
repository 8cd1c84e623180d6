// The prelude for Apple GPUs: prelude/msl.h and tile products by simdgroup_matrix.

#define LILY_UNROLL _Pragma("clang loop unroll(full)")
#define LILY_NO_UNROLL _Pragma("clang loop unroll(disable)")

#include "prelude/msl.h"

// One simdgroup's C [M, N] fp32 += A [M, K] x B, A and B of type T in threadgroup memory; M, N, K multiples
// of 16, rows 16-byte aligned. Each lane holds ELEMENTS values; values[2 * j] and values[2 * j + 1] are
// neighbours in one row, the first in an even column.
//
// 8 x 8 fragments. Operands are widened to fp32, whose products of 16-bit floats are exact. Lane l holds row
// (l / 16) * 4 + (l / 2) % 4 and columns ((l / 8) % 2) * 4 + (l % 2) * 2 + {0, 1} of a fragment.
template <typename T, int M, int N>
struct lily_tile {
  static_assert(M % 16 == 0 && N % 16 == 0, "tile sides are multiples of 16");
  enum : int { FRAGMENT_COLS = N / 8, FRAGMENT_ROWS = M / 8, ELEMENTS = M * N / 32 };
  f32 values[ELEMENTS];

  static LILY_INLINE int detail_row(u32 lane) {
    return int((lane / 16) * 4 + (lane / 2) % 4);
  }
  static LILY_INLINE int detail_col(u32 lane) {
    return int(((lane / 8) % 2) * 4 + (lane % 2) * 2);
  }
  static LILY_INLINE int row(int element, u32 lane) {
    return (element / 2) / FRAGMENT_COLS * 8 + detail_row(lane);
  }
  static LILY_INLINE int col(int element, u32 lane) {
    return (element / 2) % FRAGMENT_COLS * 8 + detail_col(lane) + element % 2;
  }

  LILY_INLINE void zero() {
    LILY_UNROLL
    for (int i = 0; i < ELEMENTS; ++i) {
      values[i] = 0.0f;
    }
  }

  // B [N, K]: C += A B^T.
  template <int K>
  LILY_INLINE void multiply_nt(
      const threadgroup T* a, int a_stride, const threadgroup T* b, int b_stride, u32 lane) {
    detail_multiply<K>(a, a_stride, b, 1, b_stride, lane);
  }

  // B [K, N]: C += A B.
  template <int K>
  LILY_INLINE void multiply_nn(
      const threadgroup T* a, int a_stride, const threadgroup T* b, int b_stride, u32 lane) {
    detail_multiply<K>(a, a_stride, b, b_stride, 1, lane);
  }

  template <int K>
  LILY_INLINE void detail_multiply(
      const threadgroup T* a, int a_stride, const threadgroup T* b, int b_k_stride, int b_n_stride, u32 lane) {
    static_assert(K % 16 == 0, "K is a multiple of 16");
    const int fragment_r = detail_row(lane);
    const int fragment_c = detail_col(lane);
    a += fragment_r * a_stride + fragment_c;
    b += fragment_r * b_k_stride + fragment_c * b_n_stride;
    LILY_UNROLL
    for (int k = 0; k < K; k += 8) {
      simdgroup_matrix<f32, 8, 8> a_fragments[FRAGMENT_ROWS];
      simdgroup_matrix<f32, 8, 8> b_fragments[FRAGMENT_COLS];
      LILY_UNROLL
      for (int i = 0; i < FRAGMENT_ROWS; ++i) {
        const threadgroup T* source = a + i * 8 * a_stride + k;
        reinterpret_cast<thread float2&>(a_fragments[i].thread_elements()) =
            float2(lily_to_f32(source[0]), lily_to_f32(source[1]));
      }
      LILY_UNROLL
      for (int j = 0; j < FRAGMENT_COLS; ++j) {
        const threadgroup T* source = b + j * 8 * b_n_stride + k * b_k_stride;
        reinterpret_cast<thread float2&>(b_fragments[j].thread_elements()) =
            float2(lily_to_f32(source[0]), lily_to_f32(source[b_n_stride]));
      }
      LILY_UNROLL
      for (int i = 0; i < FRAGMENT_ROWS; ++i) {
        LILY_UNROLL
        for (int j = 0; j < FRAGMENT_COLS; ++j) {
          thread f32* c = values + (i * FRAGMENT_COLS + j) * 2;
          simdgroup_matrix<f32, 8, 8> c_fragment;
          reinterpret_cast<thread float2&>(c_fragment.thread_elements()) = float2(c[0], c[1]);
          simdgroup_multiply_accumulate(c_fragment, a_fragments[i], b_fragments[j], c_fragment);
          const float2 product = reinterpret_cast<thread float2&>(c_fragment.thread_elements());
          c[0] = product.x;
          c[1] = product.y;
        }
      }
    }
  }
};

// ---- tile products with quantised matrices -----------------------------------------------------------
// Meanings are those of prelude/host.h.
template <typename T, int STEP>
struct lily_packed_left {
  static LILY_INLINE void put(threadgroup T* a, int row, int chunk, lily_vec<T, 8> values) {
    lily_store(a + row * STEP + (chunk ^ (row % 8)) * 8, values);
  }
};

// Lane l holds, of each fragment of 8 rows, row l / 4 and of it STEP / 4 columns from STEP / 4 * (l % 4) on. Which
// lane multiplies a number is simdgroup_matrix's choice, so words, scales and biases are shuffled.
template <typename T, typename ScaleT, int N, int BITS, int GROUP, int STEP>
struct lily_packed_right {
  static_assert(N % 16 == 0 && (BITS == 4 || BITS == 8) && GROUP % 32 == 0, "N % 16, 4 or 8 bits, groups of 32 i");
  static_assert(STEP == 64 || STEP == 128, "64 or 128 columns");
  enum : int { FRAGMENTS = N / 8, WORDS = BITS * STEP / 128, EIGHTS = STEP / 32 };
  lily_vec<u32, WORDS> words[FRAGMENTS];
  ScaleT scales[FRAGMENTS];
  ScaleT biases[FRAGMENTS];

  LILY_INLINE void load(
      const device u32* first_words, const device ScaleT* first_scales, const device ScaleT* first_biases,
      int row_columns, int first_column, int row_count, u32 lane) {
    // What changes from step to step is the same in all lanes, so addresses are sums of one and the other.
    const int own = int(lane % 4);
    const device u32* words_at = first_words + first_column / (32 / BITS);
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

  // The number at row n of fragment f and column 8 * eighth + k; f and eighth are those of the whole simdgroup.
  LILY_INLINE f32 detail_number(int f, int n, int eighth, int k) const {
    const u32 owner = u32(n * 4 + eighth / EIGHTS);
    const f32 scale = lily_shuffle(lily_to_f32(scales[f]), owner);
    const f32 bias = lily_shuffle(lily_to_f32(biases[f]), owner);
    f32 number;
    if constexpr (BITS == 4) {
      number = lily_nibble_f32(lily_shuffle(lily_word(words[f], eighth % EIGHTS), owner), k);
    } else {
      const u32 low = lily_shuffle(lily_word(words[f], eighth % EIGHTS * 2), owner);
      const u32 high = lily_shuffle(lily_word(words[f], eighth % EIGHTS * 2 + 1), owner);
      number = lily_byte_f32(k < 4 ? low : high, k % 4);
    }
    return lily_to_f32(lily_from_f32<T>(lily_fma(number, scale, bias)));
  }
};

template <int COUNT, typename T, typename ScaleT, int M, int N, int BITS, int GROUP, int STEP>
LILY_INLINE void lily_multiply_packed(
    thread lily_tile<T, M, N>* c, const threadgroup T* a,
    const thread lily_packed_right<T, ScaleT, N, BITS, GROUP, STEP>* b, u32 lane) {
  enum : int { ROW_FRAGMENTS = M / 8, COL_FRAGMENTS = N / 8 };
  const int fragment_r = lily_tile<T, M, N>::detail_row(lane);
  const int fragment_c = lily_tile<T, M, N>::detail_col(lane);
  LILY_UNROLL
  for (int eighth = 0; eighth < STEP / 8; ++eighth) {
    simdgroup_matrix<f32, 8, 8> b_fragments[COUNT * COL_FRAGMENTS];
    LILY_UNROLL
    for (int t = 0; t < COUNT; ++t) {
      LILY_UNROLL
      for (int f = 0; f < COL_FRAGMENTS; ++f) {
        reinterpret_cast<thread float2&>(b_fragments[t * COL_FRAGMENTS + f].thread_elements()) = float2(
            b[t].detail_number(f, fragment_c, eighth, fragment_r),
            b[t].detail_number(f, fragment_c + 1, eighth, fragment_r));
      }
    }
    const threadgroup T* source = a + fragment_r * STEP + (eighth ^ fragment_r) * 8 + fragment_c;
    LILY_UNROLL
    for (int i = 0; i < ROW_FRAGMENTS; ++i) {
      simdgroup_matrix<f32, 8, 8> a_fragment;
      reinterpret_cast<thread float2&>(a_fragment.thread_elements()) =
          float2(lily_to_f32(source[i * 8 * STEP]), lily_to_f32(source[i * 8 * STEP + 1]));
      LILY_UNROLL
      for (int t = 0; t < COUNT; ++t) {
        LILY_UNROLL
        for (int f = 0; f < COL_FRAGMENTS; ++f) {
          thread f32* values = c[t].values + (i * COL_FRAGMENTS + f) * 2;
          simdgroup_matrix<f32, 8, 8> c_fragment;
          reinterpret_cast<thread float2&>(c_fragment.thread_elements()) = float2(values[0], values[1]);
          simdgroup_multiply_accumulate(
              c_fragment, a_fragment, b_fragments[t * COL_FRAGMENTS + f], c_fragment);
          const float2 product = reinterpret_cast<thread float2&>(c_fragment.thread_elements());
          values[0] = product.x;
          values[1] = product.y;
        }
      }
    }
  }
}
