// simdgroup_matrix: an 8 x 8 matrix spread over the simdgroup, two neighbouring elements of a row per lane.
#pragma once
#pragma clang system_header

#include "simd.h"

namespace lily {

// Where Apple's GPUs keep element (row, column): lane bits 4, 2, 1 are the row, bits 3 and 0 the pair of
// columns.
struct matrix_place {
  int row, column;
  explicit constexpr matrix_place(uint lane)
      : row(int((lane >> 4 & 1) * 4 + (lane >> 1 & 3))), column(int((lane >> 3 & 1) * 4 + (lane & 1) * 2)) {}
};

} // namespace lily

namespace metal {

template <typename T, int Cols, int Rows>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "simdgroup matrices are 8 x 8");
  static_assert(lily::is_real<T>, "simdgroup matrices hold half, bfloat or float");
  using storage_type = vec<T, 2>;

  simdgroup_matrix() = default;
  // A diagonal matrix, as Metal's constructor makes; make_filled_simdgroup_matrix fills.
  explicit simdgroup_matrix(T diagonal) {
    lily::matrix_place place(lily::rt::lane());
    elements.v[0] = place.row == place.column ? diagonal : T(0);
    elements.v[1] = place.row == place.column + 1 ? diagonal : T(0);
  }
  storage_type& thread_elements() {
    return elements;
  }
  const storage_type& thread_elements() const {
    return elements;
  }

 private:
  storage_type elements;
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int Cols, int Rows = Cols>
LILY_RT_INLINE simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Cols, Rows> out;
  out.thread_elements() = vec<T, 2>(value);
  return out;
}
template <typename T, int Cols, int Rows = Cols>
LILY_RT_INLINE simdgroup_matrix<T, Cols, Rows> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, Cols, Rows>(value);
}

} // namespace metal

namespace lily {

// Loads and stores exchange nothing: the lanes of a checked launch meet to show that they came the same way.
// After a load and before a store, so that a barrier missing between a write and a read still shows.
LILY_RT_INLINE void matrix_access([[maybe_unused]] rt::Op name, [[maybe_unused]] int line) {
#if defined(LILY_RT_CHECKED)
  uint active = 0;
  rt::simd_collective(name, line, nullptr, 0, nullptr, &active);
#endif
}

} // namespace lily

namespace metal {

// Element (row, column) is at origin.y + row, origin.x + column; transposed, the other way round.
template <typename T, typename P>
LILY_RT_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& out, P* source, ulong elements_per_row = 8,
                           ulong2 matrix_origin = 0, bool transpose_matrix = false,
                           int line = __builtin_LINE()) {
  static_assert(is_same_v<lily::plain<P>, T>, "the pointer and the matrix differ in type");
#ifdef LILY_STRICT
  static_assert(lily::in_device<P> || lily::in_threadgroup<P>, "lily matrix-pointer");
#endif
  lily::matrix_place place(lily::rt::lane());
  for (int i = 0; i < 2; ++i) {
    ulong row = ulong(place.row), column = ulong(place.column + i);
    out.thread_elements().v[i] = transpose_matrix
        ? source[(matrix_origin.y + column) * elements_per_row + matrix_origin.x + row]
        : source[(matrix_origin.y + row) * elements_per_row + matrix_origin.x + column];
  }
  lily::matrix_access("simdgroup_load", line);
}
template <typename T, typename P>
LILY_RT_INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> from, P* target, ulong elements_per_row = 8,
                            ulong2 matrix_origin = 0, bool transpose_matrix = false,
                            int line = __builtin_LINE()) {
  static_assert(is_same_v<lily::plain<P>, T>, "the pointer and the matrix differ in type");
#ifdef LILY_STRICT
  static_assert(lily::in_device<P> || lily::in_threadgroup<P>, "lily matrix-pointer");
#endif
  lily::matrix_access("simdgroup_store", line);
  lily::matrix_place place(lily::rt::lane());
  for (int i = 0; i < 2; ++i) {
    ulong row = ulong(place.row), column = ulong(place.column + i);
    target[transpose_matrix ? (matrix_origin.y + column) * elements_per_row + matrix_origin.x + row
                            : (matrix_origin.y + row) * elements_per_row + matrix_origin.x + column] =
        from.thread_elements().v[i];
  }
}

} // namespace metal

namespace lily {

// d = a b + c of 8 x 8 matrices, in float, over k ascending with fused multiply-adds; rounded once at the
// end.
struct matrix_operands {
  float a[2], b[2], c[2];
};
LILY_RT_INLINE void multiply_accumulate(matrix_operands* lanes, rt::u32) {
  float a[8][8], b[8][8], c[8][8];
  for (uint lane = 0; lane < 32; ++lane) {
    matrix_place place(lane);
    for (int i = 0; i < 2; ++i) {
      a[place.row][place.column + i] = lanes[lane].a[i];
      b[place.row][place.column + i] = lanes[lane].b[i];
      c[place.row][place.column + i] = lanes[lane].c[i];
    }
  }
  for (int row = 0; row < 8; ++row) {
    for (int k = 0; k < 8; ++k) {
      for (int column = 0; column < 8; ++column) {
        c[row][column] = __builtin_fmaf(a[row][k], b[k][column], c[row][column]);
      }
    }
  }
  for (uint lane = 0; lane < 32; ++lane) {
    matrix_place place(lane);
    lanes[lane].c[0] = c[place.row][place.column];
    lanes[lane].c[1] = c[place.row][place.column + 1];
  }
}

template <typename D, typename A, typename B, typename C>
void matrix_product(rt::Op name, D& d, A& a, B& b, C c, int line) {
  matrix_operands mine;
  for (int i = 0; i < 2; ++i) {
    mine.a[i] = float(a.thread_elements().v[i]);
    mine.b[i] = float(b.thread_elements().v[i]);
    mine.c[i] = float(c.v[i]);
  }
  mine = rt::simd_combine(name, line, mine, multiply_accumulate);
  for (int i = 0; i < 2; ++i) {
    auto& element = d.thread_elements().v[i];
    element = plain<decltype(element)>(mine.c[i]);
  }
}

} // namespace lily

namespace metal {

template <typename D, typename A, typename B>
LILY_RT_INLINE void simdgroup_multiply(
    simdgroup_matrix<D, 8, 8>& d,
    simdgroup_matrix<A, 8, 8> a,
    simdgroup_matrix<B, 8, 8> b,
    int line = __builtin_LINE()) {
  lily::matrix_product("simdgroup_multiply", d, a, b, vec<float, 2>(0.0f), line);
}
template <typename D, typename A, typename B, typename C>
LILY_RT_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                          simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c,
                                          int line = __builtin_LINE()) {
  lily::matrix_product("simdgroup_multiply_accumulate", d, a, b, c.thread_elements(), line);
}
template <typename T>
LILY_RT_INLINE simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b) {
  simdgroup_matrix<T, 8, 8> d;
  simdgroup_multiply(d, a, b, __builtin_LINE());
  return d;
}

} // namespace metal
