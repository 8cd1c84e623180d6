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
