// vec<T, N>, packed_vec<T, N> and the small matrices.
//
// Vectors are classes, not the compiler's ext_vector types: constructors, conversions, bool vectors and
// element references then behave as Metal's. Operators are non-template friends, so that an unconstrained
// operator template in a source (MLX has one for its tiles) never wins against them. The rewriter turns a
// swizzle that is read into lily_get and one that is assigned into lily_set, both below.
#pragma once
#pragma clang system_header

#include "base.h"

namespace lily {

template <int... I>
struct lanes {};

constexpr int power_of_two(int n) {
  int p = 1;
  while (p < n) {
    p *= 2;
  }
  return p;
}
template <typename T, int N>
struct alignas(power_of_two(N) * sizeof(T)) storage {
  T v[N];
};
template <typename T>
struct alignas(2 * sizeof(T)) storage<T, 2> {
  union {
    T v[2];
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
  };
};
template <typename T>
struct alignas(4 * sizeof(T)) storage<T, 3> {
  union {
    T v[3];
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
  };
};
template <typename T>
struct alignas(4 * sizeof(T)) storage<T, 4> {
  union {
    T v[4];
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
  };
};

template <typename T, int N>
struct packed_storage {
  T v[N];
};
template <typename T>
struct packed_storage<T, 2> {
  union {
    T v[2];
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
  };
};
template <typename T>
struct packed_storage<T, 3> {
  union {
    T v[3];
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
  };
};
template <typename T>
struct packed_storage<T, 4> {
  union {
    T v[4];
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
  };
};

} // namespace lily

// Metal has 2 to 4 elements; the compiler's own vectors, which MLX's headers use behind its back, 8 and 16 too.
#define LILY_CHECK_VECTOR(T, N) \
  static_assert((N >= 1 && N <= 4) || N == 8 || N == 16, "lily type: a vector has 2, 3 or 4 elements"); \
  static_assert(lily::is_scalar<T>, "lily type: the elements of a vector are integers, bool or reals");

namespace metal {
template <typename T, int N>
struct vec;
template <typename T, int N>
struct packed_vec;
} // namespace metal

namespace lily {

template <typename T>
struct vector_traits {
  using element = T;
  static constexpr int size = 0;
};
template <typename T, int N>
struct vector_traits<metal::vec<T, N>> {
  using element = T;
  static constexpr int size = N;
};
template <typename T, int N>
struct vector_traits<metal::packed_vec<T, N>> {
  using element = T;
  static constexpr int size = N;
};
template <typename T>
concept Vector = vector_traits<plain<T>>::size > 0;
template <typename T>
using element_t = typename vector_traits<plain<T>>::element;
template <typename T>
constexpr int size_of = vector_traits<plain<T>>::size;
// How many elements an argument of a vector constructor stands for.
template <typename T>
constexpr int width = size_of<T> > 0 ? size_of<T> : 1;

// In braces elements may be missing, which are zero, in parentheses not. C++ cannot tell the two apart here: the host
// takes both, and the strict pass neither.
template <int Given, int N>
#ifdef LILY_STRICT
constexpr bool fills = Given == N;
#else
constexpr bool fills = Given <= N;
#endif

// The target of `v.yx = ...`.
template <typename T, int... I>
struct swizzle {
  T* v;
  using value_type = metal::vec<plain<T>, sizeof...(I)>;
  constexpr operator value_type() const {
    return value_type(v[I]...);
  }
  constexpr void operator=(value_type from) const {
    int i = 0;
    ((v[I] = from.v[i++]), ...);
  }
#define LILY_COMPOUND(op) \
  constexpr void operator op##=(value_type by) const { \
    *this = value_type(*this) op by; \
  }
  LILY_COMPOUND(+)
  LILY_COMPOUND(-)
  LILY_COMPOUND(*)
  LILY_COMPOUND(/)
  LILY_COMPOUND(%)
  LILY_COMPOUND(&)
  LILY_COMPOUND(|)
  LILY_COMPOUND(^)
  LILY_COMPOUND(<<)
  LILY_COMPOUND(>>)
#undef LILY_COMPOUND
};

} // namespace lily

template <typename To, typename From>
  requires(
      sizeof(To) == sizeof(From) && (lily::Scalar<To> || lily::Vector<To>) &&
      (lily::Scalar<From> || lily::Vector<From>))
constexpr To as_type(From from) {
  return __builtin_bit_cast(To, from);
}

// Members shared by vec and packed_vec. With address spaces `this` is deduced, which takes C++23.
#ifdef LILY_STRICT
#define LILY_VECTOR_ACCESS(self_t) \
  template <typename Self> \
  constexpr auto& operator[](this Self& self, size_t i) { \
    return self.v[i]; \
  } \
  constexpr T operator[](this self_t&& self, size_t i) { \
    return self.v[i]; \
  } \
  template <typename Self, int... I> \
  constexpr auto lily_get(this const Self& self, lily::lanes<I...>) { \
    static_assert(((I < N) && ...), "lily swizzle-size"); \
    return metal::vec<T, int(sizeof...(I))>(self.v[I]...); \
  } \
  template <typename Self, int... I> \
  constexpr auto lily_set(this Self& self, lily::lanes<I...>) { \
    static_assert(((I < N) && ...), "lily swizzle-size"); \
    static_assert(((1 << I) + ...) == ((1 << I) | ...), "lily swizzle-twice"); \
    return lily::swizzle<__remove_reference_t(decltype((self.v[0]))), I...>{&self.v[0]}; \
  } \
  LILY_CLASS(self_t)
#define LILY_VECTOR_COMPOUND(self_t, op) \
  template <typename Self> \
  constexpr Self& operator op##=(this Self& self, self_t b) { \
    for (int i = 0; i < N; ++i) { \
      self.v[i] = T(self.v[i] op b.v[i]); \
    } \
    return self; \
  }
#define LILY_VECTOR_STEP(self_t, op) \
  template <typename Self> \
  constexpr Self& operator op##op(this Self& self) { \
    return self op##= self_t(T(1)); \
  } \
  template <typename Self> \
  constexpr self_t operator op##op(this Self& self, int) { \
    self_t old = self; \
    self op##= self_t(T(1)); \
    return old; \
  }
#else
#define LILY_VECTOR_ACCESS(self_t) \
  constexpr T& operator[](size_t i) { \
    lily::rt::check_index(i, N); \
    return this->v[i]; \
  } \
  constexpr const T& operator[](size_t i) const { \
    lily::rt::check_index(i, N); \
    return this->v[i]; \
  } \
  template <int... I> \
  constexpr auto lily_get(lily::lanes<I...>) const { \
    return metal::vec<T, int(sizeof...(I))>(this->v[I]...); \
  } \
  template <int... I> \
  constexpr auto lily_set(lily::lanes<I...>) { \
    return lily::swizzle<T, I...>{this->v}; \
  }
#define LILY_VECTOR_COMPOUND(self_t, op) \
  constexpr self_t& operator op##=(self_t b) { \
    for (int i = 0; i < N; ++i) { \
      this->v[i] = T(this->v[i] op b.v[i]); \
    } \
    return *this; \
  }
#define LILY_VECTOR_STEP(self_t, op) \
  constexpr self_t& operator op##op() { \
    return *this op##= self_t(T(1)); \
  } \
  constexpr self_t operator op##op(int) { \
    self_t old = *this; \
    *this op##= self_t(T(1)); \
    return old; \
  }
#endif

#ifdef LILY_STRICT
// A scalar takes the vector's element type, and no real becomes an integer that way.
#define LILY_VECTOR_NARROWING(self_t, op) \
  template <typename U> \
    requires(lily::is_real<U> && !lily::is_real<T>) \
  friend constexpr vec<T, N> operator op(self_t, U) = delete; \
  template <typename U> \
    requires(lily::is_real<U> && !lily::is_real<T>) \
  friend constexpr vec<T, N> operator op(U, self_t) = delete;
#else
#define LILY_VECTOR_NARROWING(self_t, op)
#endif
#define LILY_VECTOR_ARITHMETIC(self_t, op) \
  LILY_VECTOR_NARROWING(self_t, op) \
  friend constexpr vec<T, N> operator op(self_t a, self_t b) { \
    vec<T, N> c{}; \
    for (int i = 0; i < N; ++i) { \
      c.v[i] = T(a.v[i] op b.v[i]); \
    } \
    return c; \
  } \
  friend constexpr vec<T, N> operator op(self_t a, T b) { \
    return a op self_t(b); \
  } \
  friend constexpr vec<T, N> operator op(T a, self_t b) { \
    return self_t(a) op b; \
  } \
  LILY_VECTOR_COMPOUND(self_t, op)
#define LILY_VECTOR_PREDICATE(self_t, op) \
  friend constexpr vec<bool, N> operator op(self_t a, self_t b) { \
    vec<bool, N> c{}; \
    for (int i = 0; i < N; ++i) { \
      c.v[i] = a.v[i] op b.v[i]; \
    } \
    return c; \
  } \
  friend constexpr vec<bool, N> operator op(self_t a, T b) { \
    return a op self_t(b); \
  } \
  friend constexpr vec<bool, N> operator op(T a, self_t b) { \
    return self_t(a) op b; \
  }
#define LILY_PACKED_MIXED(op) \
  friend constexpr auto operator op(packed_vec a, vec<T, N> b) { \
    return vec<T, N>(a) op b; \
  } \
  friend constexpr auto operator op(vec<T, N> a, packed_vec b) { \
    return a op vec<T, N>(b); \
  }
#define LILY_VECTOR_OPERATORS(self_t) \
  LILY_VECTOR_ARITHMETIC(self_t, +) \
  LILY_VECTOR_ARITHMETIC(self_t, -) \
  LILY_VECTOR_ARITHMETIC(self_t, *) \
  LILY_VECTOR_ARITHMETIC(self_t, /) \
  LILY_VECTOR_ARITHMETIC(self_t, %) \
  LILY_VECTOR_ARITHMETIC(self_t, &) \
  LILY_VECTOR_ARITHMETIC(self_t, |) \
  LILY_VECTOR_ARITHMETIC(self_t, ^) \
  LILY_VECTOR_ARITHMETIC(self_t, <<) \
  LILY_VECTOR_ARITHMETIC(self_t, >>) \
  LILY_VECTOR_PREDICATE(self_t, ==) \
  LILY_VECTOR_PREDICATE(self_t, !=) \
  LILY_VECTOR_PREDICATE(self_t, <) \
  LILY_VECTOR_PREDICATE(self_t, <=) \
  LILY_VECTOR_PREDICATE(self_t, >) \
  LILY_VECTOR_PREDICATE(self_t, >=) \
  LILY_VECTOR_PREDICATE(self_t, &&) \
  LILY_VECTOR_PREDICATE(self_t, ||) \
  friend constexpr vec<T, N> operator-(self_t a) { \
    vec<T, N> c{}; \
    for (int i = 0; i < N; ++i) { \
      c.v[i] = T(-a.v[i]); \
    } \
    return c; \
  } \
  friend constexpr vec<T, N> operator+(self_t a) { \
    return a; \
  } \
  friend constexpr vec<T, N> operator~(self_t a) { \
    vec<T, N> c{}; \
    for (int i = 0; i < N; ++i) { \
      c.v[i] = T(~a.v[i]); \
    } \
    return c; \
  } \
  friend constexpr vec<bool, N> operator!(self_t a) { \
    vec<bool, N> c{}; \
    for (int i = 0; i < N; ++i) { \
      c.v[i] = !a.v[i]; \
    } \
    return c; \
  } \
  LILY_VECTOR_STEP(self_t, +) \
  LILY_VECTOR_STEP(self_t, -)
#define LILY_VECTOR_CONSTRUCTORS(self_t) \
  constexpr self_t() = default; \
  template <typename U> \
    requires(lily::is_scalar<U>) \
  constexpr self_t(U x) { \
    for (int i = 0; i < N; ++i) { \
      this->v[i] = lily::cast<T>(x); \
    } \
  } \
  template <typename... A> \
    requires(sizeof...(A) > 1 && lily::fills<(0 + ... + lily::width<A>), N>) \
  constexpr self_t(A... parts) { \
    int i = 0; \
    (append(i, parts), ...); \
    while (i < N) { \
      this->v[i++] = T(0); \
    } \
  } \
  template <typename A> \
  constexpr void append(int& at, const A& part) { \
    if constexpr (lily::Vector<A>) { \
      for (int i = 0; i < lily::size_of<A>; ++i) { \
        this->v[at++] = lily::cast<T>(part.v[i]); \
      } \
    } else { \
      this->v[at++] = lily::cast<T>(part); \
    } \
  }

namespace metal {

template <typename T, int N>
struct vec : lily::storage<T, N> {
  LILY_CHECK_VECTOR(T, N)
  using value_type = T;
  static constexpr int size = N;
  LILY_VECTOR_CONSTRUCTORS(vec)
  template <typename U>
    requires(!__is_same(U, T))
  explicit constexpr vec(vec<U, N> from) {
    for (int i = 0; i < N; ++i) {
      this->v[i] = lily::cast<T>(from.v[i]);
    }
  }
  template <typename U>
    requires(!__is_same(U, T))
  explicit constexpr vec(packed_vec<U, N> from) : vec(vec<U, N>(from)) {}
  LILY_VECTOR_ACCESS(vec)
  LILY_VECTOR_OPERATORS(vec)
};

template <typename T, int N>
struct packed_vec : lily::packed_storage<T, N> {
  LILY_CHECK_VECTOR(T, N)
  using value_type = T;
  LILY_VECTOR_CONSTRUCTORS(packed_vec)
  constexpr packed_vec(vec<T, N> from) {
    for (int i = 0; i < N; ++i) {
      this->v[i] = from.v[i];
    }
  }
  template <typename U>
    requires(!__is_same(U, T))
  explicit constexpr packed_vec(vec<U, N> from) : packed_vec(vec<T, N>(from)) {}
#ifdef LILY_STRICT
  template <typename Self>
  constexpr operator vec<T, N>(this const Self& self) {
    vec<T, N> out{};
    for (int i = 0; i < N; ++i) {
      out.v[i] = self.v[i];
    }
    return out;
  }
#else
  constexpr operator vec<T, N>() const {
    vec<T, N> out{};
    for (int i = 0; i < N; ++i) {
      out.v[i] = this->v[i];
    }
    return out;
  }
#endif
  LILY_VECTOR_ACCESS(packed_vec)
  LILY_VECTOR_OPERATORS(packed_vec)
  LILY_PACKED_MIXED(+)
  LILY_PACKED_MIXED(-)
  LILY_PACKED_MIXED(*)
  LILY_PACKED_MIXED(/)
  LILY_PACKED_MIXED(==)
  LILY_PACKED_MIXED(!=)
  LILY_PACKED_MIXED(<)
  LILY_PACKED_MIXED(<=)
  LILY_PACKED_MIXED(>)
  LILY_PACKED_MIXED(>=)
};

} // namespace metal

#undef LILY_VECTOR_ACCESS
#undef LILY_VECTOR_COMPOUND
#undef LILY_VECTOR_ARITHMETIC
#undef LILY_VECTOR_NARROWING
#undef LILY_VECTOR_PREDICATE
#undef LILY_PACKED_MIXED
#undef LILY_VECTOR_OPERATORS
#undef LILY_VECTOR_CONSTRUCTORS

#define LILY_VECTOR_NAMES(T) \
  typedef metal::vec<T, 2> T##2; \
  typedef metal::vec<T, 3> T##3; \
  typedef metal::vec<T, 4> T##4; \
  typedef metal::packed_vec<T, 2> packed_##T##2; \
  typedef metal::packed_vec<T, 3> packed_##T##3; \
  typedef metal::packed_vec<T, 4> packed_##T##4; \
  namespace metal { \
  using ::T##2; \
  using ::T##3; \
  using ::T##4; \
  using ::packed_##T##2; \
  using ::packed_##T##3; \
  using ::packed_##T##4; \
  }
LILY_VECTOR_NAMES(bool)
LILY_VECTOR_NAMES(char)
LILY_VECTOR_NAMES(uchar)
LILY_VECTOR_NAMES(short)
LILY_VECTOR_NAMES(ushort)
LILY_VECTOR_NAMES(int)
LILY_VECTOR_NAMES(uint)
LILY_VECTOR_NAMES(long)
LILY_VECTOR_NAMES(ulong)
LILY_VECTOR_NAMES(half)
LILY_VECTOR_NAMES(bfloat)
LILY_VECTOR_NAMES(float)
#undef LILY_VECTOR_NAMES

namespace metal {

using ::as_type;
using ::bfloat;
using ::half;
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::ptrdiff_t;
using ::size_t;
using ::uchar;
using ::uint;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;
using ::ulong;
using ::ushort;

template <typename T>
struct is_vector : bool_constant<lily::Vector<T>> {};
template <typename T>
constexpr bool is_vector_v = lily::Vector<T>;

} // namespace metal

namespace lily {

template <typename A, typename... B>
struct first_vector : metal::conditional_t<Vector<A>, metal::type_identity<A>, first_vector<B...>> {};
template <typename A>
struct first_vector<A> : metal::type_identity<A> {};

template <typename T, typename A>
constexpr auto element(const A& a, int i) {
  if constexpr (Vector<A>) {
    return a.v[i];
  } else {
    return cast<T>(a);
  }
}

// f of every element; a scalar among the arguments takes the vectors' element type.
template <typename F, typename... A>
constexpr auto lift(F f, A... a) {
  using V = typename first_vector<A...>::type;
  using T = element_t<V>;
  metal::vec<decltype(f(element<T>(a, 0)...)), size_of<V>> out{};
  for (int i = 0; i < size_of<V>; ++i) {
    out.v[i] = f(element<T>(a, i)...);
  }
  return out;
}

} // namespace lily
