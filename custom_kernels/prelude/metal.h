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
