// The prelude for the host launcher, which runs Metal source on the CPU: prelude/msl.h and tile products by
// loops, which a debugger can step through and which run faster than emulated matrix fragments.

// Unrolled loops take several times as long to compile and run no faster here.
#define LILY_UNROLL
#define LILY_NO_UNROLL

#include "prelude/msl.h"

// One simdgroup's C [M, N] fp32 += A [M, K] x B, A and B of type T in threadgroup memory; M, N, K multiples
// of 16, rows 16-byte aligned. Each lane holds ELEMENTS values; values[2 * j] and values[2 * j + 1] are
// neighbours in one row, the first in an even column.
//
// The 32 lanes own column pairs in turn, so the layout is neither Metal's nor CUDA's: a kernel that assumes
// one of those instead of asking row() and col() fails here.
template <typename T, int M, int N>
struct lily_tile {
  static_assert(M % 16 == 0 && N % 16 == 0, "tile sides are multiples of 16");
  enum : int { ELEMENTS = M * N / 32 };
  f32 values[ELEMENTS];

  static LILY_INLINE int row(int element, u32 lane) {
    return ((element / 2) * 32 + int(lane)) / (N / 2);
  }
  static LILY_INLINE int col(int element, u32 lane) {
    return ((element / 2) * 32 + int(lane)) % (N / 2) * 2 + element % 2;
  }

  LILY_INLINE void zero() {
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
    for (int i = 0; i < ELEMENTS; ++i) {
      const threadgroup T* a_row = a + row(i, lane) * a_stride;
      const threadgroup T* b_col = b + col(i, lane) * b_n_stride;
      for (int k = 0; k < K; ++k) {
        values[i] = lily_fma(lily_to_f32(a_row[k]), lily_to_f32(b_col[k * b_k_stride]), values[i]);
      }
    }
  }
};

// ---- tile products with quantised matrices -----------------------------------------------------------
// The left operand A [M, STEP] of type T in threadgroup memory, 16-byte aligned, M * STEP elements; STEP is 64 or 128. How they lie there is the
// back-end's choice: put() writes the 8 values of columns 8 * chunk to 8 * chunk + 7.
template <typename T, int STEP>
struct lily_packed_left {
  static LILY_INLINE void put(threadgroup T* a, int row, int chunk, lily_vec<T, 8> values) {
    lily_store(a + row * STEP + chunk * 8, values);
  }
};

// The right operand B [N, STEP], columns first_column to first_column + STEP - 1 of N rows of a matrix quantised as MLX does
// (w = scale * q + bias, numbers from the low bits of a word on), expanded in registers. Each number is
// rounded to T once.
//
// load() takes the addresses of the first row and asks for what the simdgroup needs; rows from row_count on, which
// is at least 1, repeat the last. row_columns, of a row, and first_column are multiples of STEP.
template <typename T, typename ScaleT, int N, int BITS, int GROUP, int STEP>
struct lily_packed_right {
  const device u32* weights;
  const device ScaleT* scales;
  const device ScaleT* biases;
  int columns;
  int column;
  int rows;

  LILY_INLINE void load(
      const device u32* first_words, const device ScaleT* first_scales, const device ScaleT* first_biases,
      int row_columns, int first_column, int row_count, u32 lane) {
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
    const f32 number = f32((word >> (k % (32 / BITS) * BITS)) & ((1u << BITS) - 1u));
    const int group = row * (columns / GROUP) + k / GROUP;
    return lily_to_f32(lily_from_f32<T>(lily_fma(number, lily_to_f32(scales[group]), lily_to_f32(biases[group]))));
  }
};

// COUNT products with one A: c[t] += A b[t]^T. A row of A that was not put spoils its row of c alone.
template <int COUNT, typename T, typename ScaleT, int M, int N, int BITS, int GROUP, int STEP>
LILY_INLINE void lily_multiply_packed(
    thread lily_tile<T, M, N>* c, const threadgroup T* a,
    const thread lily_packed_right<T, ScaleT, N, BITS, GROUP, STEP>* b, u32 lane) {
  for (int t = 0; t < COUNT; ++t) {
    for (int i = 0; i < lily_tile<T, M, N>::ELEMENTS; ++i) {
      const int row = lily_tile<T, M, N>::row(i, lane);
      const int col = lily_tile<T, M, N>::col(i, lane);
      for (int k = 0; k < STEP; ++k) {
        c[t].values[i] = lily_fma(lily_to_f32(a[row * STEP + k]), b[t].detail_number(col, k), c[t].values[i]);
      }
    }
  }
}
