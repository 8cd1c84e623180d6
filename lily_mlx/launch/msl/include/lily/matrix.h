// matrix<T, Columns, Rows>: column-major, columns are vectors.
#pragma once
#pragma clang system_header

#include "math.h"

namespace metal {

template <typename T, int Cols, int Rows = Cols>
struct matrix;
template <typename T, int K, int Rows, int Cols>
constexpr matrix<T, Cols, Rows> operator*(matrix<T, K, Rows> a, matrix<T, Cols, K> b);

template <typename T, int Cols, int Rows>
struct matrix {
  static_assert(Cols >= 2 && Cols <= 4 && Rows >= 2 && Rows <= 4, "lily type: a matrix has 2 to 4 rows and columns");
  static_assert(lily::is_real<T>, "lily type: the elements of a matrix are reals");
  using square = matrix<T, Cols, Cols>;
  vec<T, Rows> columns[Cols];

  constexpr matrix() = default;
  explicit constexpr matrix(T diagonal) {
    for (int c = 0; c < Cols; ++c) {
      columns[c] = vec<T, Rows>(T(0));
      if (c < Rows) {
        columns[c].v[c] = diagonal;
      }
    }
  }
  // Columns, which may be in braces, or all elements column by column.
  constexpr matrix(vec<T, Rows> a, vec<T, Rows> b)
    requires(Cols == 2)
      : columns{a, b} {}
  constexpr matrix(vec<T, Rows> a, vec<T, Rows> b, vec<T, Rows> c)
    requires(Cols == 3)
      : columns{a, b, c} {}
  constexpr matrix(vec<T, Rows> a, vec<T, Rows> b, vec<T, Rows> c, vec<T, Rows> d)
    requires(Cols == 4)
      : columns{a, b, c, d} {}
  template <typename... A>
    requires(sizeof...(A) == Cols * Rows && (lily::Scalar<A> && ...))
  constexpr matrix(A... elements) {
    T all[] = {T(elements)...};
    for (int i = 0; i < Cols * Rows; ++i) {
      columns[i / Rows].v[i % Rows] = all[i];
    }
  }
  template <typename U>
    requires(!__is_same(U, T))
  explicit constexpr matrix(matrix<U, Cols, Rows> from) {
    for (int c = 0; c < Cols; ++c) {
      columns[c] = vec<T, Rows>(from.columns[c]);
    }
  }
#ifdef LILY_STRICT
  template <typename Self>
  constexpr auto& operator[](this Self& self, int c) {
    return self.columns[c];
  }
  constexpr vec<T, Rows> operator[](this matrix&& self, int c) {
    return self.columns[c];
  }
  LILY_CLASS(matrix)
#else
  constexpr vec<T, Rows>& operator[](int c) {
    lily::rt::check_index(c, Cols);
    return columns[c];
  }
  constexpr const vec<T, Rows>& operator[](int c) const {
    lily::rt::check_index(c, Cols);
    return columns[c];
  }
#endif

  friend constexpr matrix operator+(matrix a, matrix b) {
    for (int c = 0; c < Cols; ++c) {
      a.columns[c] += b.columns[c];
    }
    return a;
  }
  friend constexpr matrix operator-(matrix a, matrix b) {
    for (int c = 0; c < Cols; ++c) {
      a.columns[c] -= b.columns[c];
    }
    return a;
  }
  friend constexpr matrix operator-(matrix a) {
    return a * T(-1);
  }
  friend constexpr matrix operator*(matrix a, T s) {
    for (int c = 0; c < Cols; ++c) {
      a.columns[c] *= s;
    }
    return a;
  }
  friend constexpr matrix operator*(T s, matrix a) {
    return a * s;
  }
  friend constexpr vec<T, Rows> operator*(matrix a, vec<T, Cols> x) {
    vec<T, Rows> y = a.columns[0] * x.v[0];
    for (int c = 1; c < Cols; ++c) {
      y += a.columns[c] * x.v[c];
    }
    return y;
  }
  friend constexpr vec<T, Cols> operator*(vec<T, Rows> x, matrix a) {
    vec<T, Cols> y{};
    for (int c = 0; c < Cols; ++c) {
      y.v[c] = dot(x, a.columns[c]);
    }
    return y;
  }
  friend constexpr bool operator==(matrix a, matrix b) {
    for (int c = 0; c < Cols; ++c) {
      if (!all(a.columns[c] == b.columns[c])) {
        return false;
      }
    }
    return true;
  }
#ifdef LILY_STRICT
#define LILY_MATRIX_COMPOUND(op, by_t) \
  template <typename Self> \
  constexpr Self& operator op##=(this Self& self, by_t by) { \
    self = matrix(self) op by; \
    return self; \
  }
#else
#define LILY_MATRIX_COMPOUND(op, by_t) \
  constexpr matrix& operator op##=(by_t by) { \
    return *this = *this op by; \
  }
#endif
  LILY_MATRIX_COMPOUND(+, matrix)
  LILY_MATRIX_COMPOUND(-, matrix)
  LILY_MATRIX_COMPOUND(*, T)
  LILY_MATRIX_COMPOUND(*, square)
#undef LILY_MATRIX_COMPOUND
};

template <typename T, int K, int Rows, int Cols>
constexpr matrix<T, Cols, Rows> operator*(matrix<T, K, Rows> a, matrix<T, Cols, K> b) {
  matrix<T, Cols, Rows> out;
  for (int c = 0; c < Cols; ++c) {
    out.columns[c] = a * b.columns[c];
  }
  return out;
}
template <typename T, int Cols, int Rows>
constexpr matrix<T, Rows, Cols> transpose(matrix<T, Cols, Rows> a) {
  matrix<T, Rows, Cols> out;
  for (int c = 0; c < Cols; ++c) {
    for (int r = 0; r < Rows; ++r) {
      out.columns[r].v[c] = a.columns[c].v[r];
    }
  }
  return out;
}
// Laplace expansion along the first column.
template <typename T, int N>
constexpr T determinant(matrix<T, N, N> a) {
  if constexpr (N == 1) {
    return a.columns[0].v[0];
  } else if constexpr (N == 2) {
    return a.columns[0].v[0] * a.columns[1].v[1] - a.columns[1].v[0] * a.columns[0].v[1];
  } else {
    T sum = T(0);
    for (int skip = 0; skip < N; ++skip) {
      matrix<T, N - 1, N - 1> minor;
      for (int c = 1; c < N; ++c) {
        for (int r = 0, to = 0; r < N; ++r) {
          if (r != skip) {
            minor.columns[c - 1].v[to++] = a.columns[c].v[r];
          }
        }
      }
      T term = a.columns[0].v[skip] * determinant(minor);
      sum = skip % 2 == 0 ? sum + term : sum - term;
    }
    return sum;
  }
}

} // namespace metal

#define LILY_MATRIX_NAMES(T) \
  typedef metal::matrix<T, 2, 2> T##2x2; \
  typedef metal::matrix<T, 2, 3> T##2x3; \
  typedef metal::matrix<T, 2, 4> T##2x4; \
  typedef metal::matrix<T, 3, 2> T##3x2; \
  typedef metal::matrix<T, 3, 3> T##3x3; \
  typedef metal::matrix<T, 3, 4> T##3x4; \
  typedef metal::matrix<T, 4, 2> T##4x2; \
  typedef metal::matrix<T, 4, 3> T##4x3; \
  typedef metal::matrix<T, 4, 4> T##4x4; \
  namespace metal { \
  using ::T##2x2; \
  using ::T##2x3; \
  using ::T##2x4; \
  using ::T##3x2; \
  using ::T##3x3; \
  using ::T##3x4; \
  using ::T##4x2; \
  using ::T##4x3; \
  using ::T##4x4; \
  }
LILY_MATRIX_NAMES(half)
LILY_MATRIX_NAMES(float)
#undef LILY_MATRIX_NAMES
