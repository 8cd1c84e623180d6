// The function library: math, common, geometric, relational, integer and packing functions.
#pragma once
#pragma clang system_header

#include "vec.h"

// The compiler can fold few of these functions; the others are constexpr in name only.
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Winvalid-constexpr"

#define __METAL_FAST_MATH__ true
#define __METAL_PRECISE_MATH__ false
#define __METAL_MAYBE_FAST_MATH__ true

namespace lily {

// sin, cos and tan of pi x: reduce first, in double, so that whole and half turns come out exact.
inline float sinpi(float x) {
  double r = double(x) - 2.0L * double(__builtin_rint(double(x) / 2.0L));
  return float(__builtin_sin(r * 3.14159265358979323846L));
}
inline float cospi(float x) {
  double r = double(x) - 2.0L * double(__builtin_rint(double(x) / 2.0L));
  r = r < 0 ? -r : r;
  return float(__builtin_sin((0.5L - r) * 3.14159265358979323846L));
}
inline float fract(float x) {
  float f = x - __builtin_floorf(x);
  return f < 1.0f ? f : 0x1.fffffep-1f;
}
constexpr float median(float a, float b, float c) {
  return __builtin_fmaxf(__builtin_fminf(a, b), __builtin_fminf(__builtin_fmaxf(a, b), c));
}
// Next representable half or bfloat after x towards y, through its bits.
template <typename T>
inline T next_16(T x, T y) {
  if (x != x || y != y) {
    return x != x ? x : y;
  }
  if (x == y) {
    return y;
  }
  short bits = __builtin_bit_cast(short, x);
  if (x == T(0)) {
    bits = y > x ? short(1) : short(-32767);
  } else {
    bits = short(bits + ((x < y) == (x > T(0)) ? 1 : -1));
  }
  return __builtin_bit_cast(T, bits);
}

} // namespace lily

// One definition serves float, half (computed in float, rounded once), integers (as float) and vectors. A
// bfloat is a float to these functions, as in Metal; MLX adds overloads of its own that return bfloat.
#define LILY_MATH_1(name, expr) \
  constexpr float name(float x) { \
    return expr; \
  } \
  constexpr half name(half x) { \
    return half(name(float(x))); \
  } \
  template <lily::Integer T> \
  constexpr float name(T x) { \
    return name(float(x)); \
  } \
  template <lily::Vector V> \
  constexpr auto name(V v) { \
    return lily::lift([](auto x) { return name(x); }, v); \
  }
#define LILY_MATH_2(name, expr) \
  constexpr float name(float x, float y) { \
    return expr; \
  } \
  constexpr half name(half x, half y) { \
    return half(name(float(x), float(y))); \
  } \
  template <lily::Scalar A, lily::Scalar B> \
    requires(!__is_same(A, B) || lily::Integer<A>) \
  constexpr float name(A x, B y) { \
    return name(float(x), float(y)); \
  } \
  template <typename A, typename B> \
    requires(lily::Vector<A> || lily::Vector<B>) \
  constexpr auto name(A a, B b) { \
    return lily::lift([](auto x, auto y) { return name(x, y); }, a, b); \
  }
#define LILY_MATH_3(name, expr) \
  constexpr float name(float x, float y, float z) { \
    return expr; \
  } \
  constexpr half name(half x, half y, half z) { \
    return half(name(float(x), float(y), float(z))); \
  } \
  template <lily::Scalar A, lily::Scalar B, lily::Scalar C> \
    requires(!(__is_same(A, B) && __is_same(B, C)) || lily::Integer<A>) \
  constexpr float name(A x, B y, C z) { \
    return name(float(x), float(y), float(z)); \
  } \
  template <typename A, typename B, typename C> \
    requires(lily::Vector<A> || lily::Vector<B> || lily::Vector<C>) \
  constexpr auto name(A a, B b, C c) { \
    return lily::lift([](auto x, auto y, auto z) { return name(x, y, z); }, a, b, c); \
  }

namespace lily::math {

LILY_MATH_1(acos, __builtin_acosf(x))
LILY_MATH_1(acosh, __builtin_acoshf(x))
LILY_MATH_1(asin, __builtin_asinf(x))
LILY_MATH_1(asinh, __builtin_asinhf(x))
LILY_MATH_1(atan, __builtin_atanf(x))
LILY_MATH_1(atanh, __builtin_atanhf(x))
LILY_MATH_1(ceil, __builtin_ceilf(x))
LILY_MATH_1(cos, __builtin_cosf(x))
LILY_MATH_1(cosh, __builtin_coshf(x))
LILY_MATH_1(cospi, lily::cospi(x))
LILY_MATH_1(exp, __builtin_expf(x))
LILY_MATH_1(exp2, __builtin_exp2f(x))
LILY_MATH_1(exp10, float(__builtin_pow(10.0L, double(x))))
LILY_MATH_1(fabs, __builtin_fabsf(x))
LILY_MATH_1(floor, __builtin_floorf(x))
LILY_MATH_1(fract, lily::fract(x))
LILY_MATH_1(log, __builtin_logf(x))
LILY_MATH_1(log10, __builtin_log10f(x))
LILY_MATH_1(log2, __builtin_log2f(x))
LILY_MATH_1(rint, __builtin_rintf(x))
LILY_MATH_1(round, __builtin_roundf(x))
LILY_MATH_1(rsqrt, 1.0f / __builtin_sqrtf(x))
LILY_MATH_1(sin, __builtin_sinf(x))
LILY_MATH_1(sinh, __builtin_sinhf(x))
LILY_MATH_1(sinpi, lily::sinpi(x))
LILY_MATH_1(sqrt, __builtin_sqrtf(x))
LILY_MATH_1(tan, __builtin_tanf(x))
LILY_MATH_1(tanh, __builtin_tanhf(x))
LILY_MATH_1(tanpi, lily::sinpi(x) / lily::cospi(x))
LILY_MATH_1(trunc, __builtin_truncf(x))
LILY_MATH_1(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
LILY_MATH_1(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f)
LILY_MATH_2(atan2, __builtin_atan2f(x, y))
LILY_MATH_2(copysign, __builtin_copysignf(x, y))
LILY_MATH_2(divide, x / y)
LILY_MATH_2(fdim, x > y ? x - y : x <= y ? 0.0f : __builtin_nanf(""))
LILY_MATH_2(fmax, __builtin_fmaxf(x, y))
LILY_MATH_2(fmin, __builtin_fminf(x, y))
LILY_MATH_2(fmod, __builtin_fmodf(x, y))
LILY_MATH_2(pow, __builtin_powf(x, y))
LILY_MATH_2(powr, __builtin_powf(x, y))
LILY_MATH_2(step, y < x ? 0.0f : 1.0f)
LILY_MATH_3(fma, __builtin_fmaf(x, y, z))
LILY_MATH_3(fmax3, __builtin_fmaxf(x, __builtin_fmaxf(y, z)))
LILY_MATH_3(fmin3, __builtin_fminf(x, __builtin_fminf(y, z)))
LILY_MATH_3(fmedian3, lily::median(x, y, z))
LILY_MATH_3(mix, x + (y - x) * z)

constexpr float smoothstep(float a, float b, float x) {
  float t = saturate((x - a) / (b - a));
  return t * t * (3.0f - 2.0f * t);
}
constexpr half smoothstep(half a, half b, half x) {
  return half(smoothstep(float(a), float(b), float(x)));
}
template <typename A, typename B, typename C>
  requires(lily::Vector<A> || lily::Vector<B> || lily::Vector<C>)
constexpr auto smoothstep(A a, B b, C c) {
  return lily::lift([](auto x, auto y, auto z) { return smoothstep(x, y, z); }, a, b, c);
}

inline float nextafter(float x, float y) {
  return __builtin_nextafterf(x, y);
}
inline half nextafter(half x, half y) {
  return lily::next_16(x, y);
}
inline float ldexp(float x, int k) {
  return __builtin_ldexpf(x, k);
}
inline half ldexp(half x, int k) {
  return half(__builtin_ldexpf(float(x), k));
}
template <lily::Vector V, typename K>
inline auto ldexp(V v, K k) {
  V out = v;
  for (int i = 0; i < lily::size_of<V>; ++i) {
    out.v[i] = ldexp(v.v[i], lily::element<int>(k, i));
  }
  return out;
}
inline int ilogb(float x) {
  return __builtin_ilogbf(x);
}
template <lily::Vector V>
inline auto ilogb(V v) {
  return lily::lift([](auto x) { return ilogb(float(x)); }, v);
}

// Functions with a second result through a thread reference.
#define LILY_TWO_RESULTS(name, second_t, call) \
  inline float name(float x, second_t& second) { \
    return call; \
  } \
  template <lily::Vector V, lily::Vector S> \
  inline V name(V v, S& second) { \
    V out{}; \
    for (int i = 0; i < lily::size_of<V>; ++i) { \
      out.v[i] = name(v.v[i], second.v[i]); \
    } \
    return out; \
  }
LILY_TWO_RESULTS(frexp, int, __builtin_frexpf(x, &second))
LILY_TWO_RESULTS(modf, float, __builtin_modff(x, &second))
LILY_TWO_RESULTS(sincos, float, (second = __builtin_cosf(x), __builtin_sinf(x)))
#undef LILY_TWO_RESULTS
inline half frexp(half x, int& exponent) {
  return half(frexp(float(x), exponent));
}
inline half modf(half x, half& whole) {
  float w;
  float part = modf(float(x), w);
  whole = half(w);
  return half(part);
}
inline half sincos(half x, half& cosine) {
  cosine = cos(x);
  return sin(x);
}

// abs, min, max and clamp work on integers too and keep the type; mixed scalars meet as in an expression.
template <lily::Scalar T>
constexpr auto abs(T x) {
  if constexpr (__is_same(T, bfloat)) {
    return __builtin_fabsf(float(x));
  } else if constexpr (lily::Real<T>) {
    return fabs(x);
  } else {
    return T(x < T(0) ? -x : x);
  }
}
template <lily::Vector V>
constexpr auto abs(V v) {
  return lily::lift([](auto x) { return abs(x); }, v);
}
template <lily::Scalar A, lily::Scalar B>
constexpr auto min(A x, B y) {
  using T = lily::common_t<A, B>;
  if constexpr (lily::Real<T>) {
    return fmin(T(x), T(y));
  } else {
    return T(y) < T(x) ? T(y) : T(x);
  }
}
template <lily::Scalar A, lily::Scalar B>
constexpr auto max(A x, B y) {
  using T = lily::common_t<A, B>;
  if constexpr (lily::Real<T>) {
    return fmax(T(x), T(y));
  } else {
    return T(x) < T(y) ? T(y) : T(x);
  }
}
template <lily::Scalar A, lily::Scalar B, lily::Scalar C>
constexpr auto clamp(A x, B low, C high) {
  return min(max(x, low), high);
}
template <lily::Scalar A, lily::Scalar B, lily::Scalar C>
constexpr auto min3(A x, B y, C z) {
  return min(x, min(y, z));
}
template <lily::Scalar A, lily::Scalar B, lily::Scalar C>
constexpr auto max3(A x, B y, C z) {
  return max(x, max(y, z));
}
template <lily::Scalar A, lily::Scalar B, lily::Scalar C>
constexpr auto median3(A x, B y, C z) {
  return max(min(x, y), min(max(x, y), z));
}
#define LILY_LIFT_2(name) \
  template <typename A, typename B> \
    requires(lily::Vector<A> || lily::Vector<B>) \
  constexpr auto name(A a, B b) { \
    return lily::lift([](auto x, auto y) { return name(x, y); }, a, b); \
  }
#define LILY_LIFT_3(name) \
  template <typename A, typename B, typename C> \
    requires(lily::Vector<A> || lily::Vector<B> || lily::Vector<C>) \
  constexpr auto name(A a, B b, C c) { \
    return lily::lift([](auto x, auto y, auto z) { return name(x, y, z); }, a, b, c); \
  }
LILY_LIFT_2(min)
LILY_LIFT_2(max)
LILY_LIFT_3(clamp)
LILY_LIFT_3(min3)
LILY_LIFT_3(max3)
LILY_LIFT_3(median3)

// Geometry. Sums run in the element type, in index order.
template <lily::Vector A, lily::Vector B>
constexpr auto dot(A a, B b) {
  auto sum = a.v[0] * b.v[0];
  for (int i = 1; i < lily::size_of<A>; ++i) {
    sum = sum + a.v[i] * b.v[i];
  }
  return sum;
}
template <lily::Vector V>
constexpr auto length_squared(V v) {
  return dot(v, v);
}
template <lily::Vector V>
constexpr auto length(V v) {
  return sqrt(dot(v, v));
}
template <lily::Vector A, lily::Vector B>
constexpr auto distance_squared(A a, B b) {
  return length_squared(a - b);
}
template <lily::Vector A, lily::Vector B>
constexpr auto distance(A a, B b) {
  return length(a - b);
}
template <lily::Vector V>
constexpr auto normalize(V v) {
  return v * rsqrt(dot(v, v));
}
template <typename T>
constexpr auto cross(metal::vec<T, 3> a, metal::vec<T, 3> b) {
  return metal::vec<T, 3>(a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x);
}
template <lily::Vector V>
constexpr auto faceforward(V n, V i, V nref) {
  return dot(i, nref) < 0 ? n : -n;
}
template <lily::Vector V>
constexpr auto reflect(V i, V n) {
  return i - n * (dot(n, i) * lily::element_t<V>(2));
}
template <lily::Vector V, typename T>
constexpr auto refract(V i, V n, T eta) {
  using E = lily::element_t<V>;
  E d = dot(n, i);
  E k = E(1) - E(eta) * E(eta) * (E(1) - d * d);
  return k < E(0) ? V(E(0)) : V(i * E(eta) - n * (E(eta) * d + sqrt(k)));
}

} // namespace lily::math

#define LILY_USING_TYPED(set) \
  using set::abs; \
  using set::acos; \
  using set::acosh; \
  using set::asin; \
  using set::asinh; \
  using set::atan; \
  using set::atan2; \
  using set::atanh; \
  using set::ceil; \
  using set::clamp; \
  using set::copysign; \
  using set::cos; \
  using set::cosh; \
  using set::cospi; \
  using set::cross; \
  using set::distance; \
  using set::distance_squared; \
  using set::divide; \
  using set::dot; \
  using set::exp; \
  using set::exp10; \
  using set::exp2; \
  using set::fabs; \
  using set::fdim; \
  using set::floor; \
  using set::fma; \
  using set::fmax; \
  using set::fmax3; \
  using set::fmedian3; \
  using set::fmin; \
  using set::fmin3; \
  using set::fmod; \
  using set::fract; \
  using set::length; \
  using set::length_squared; \
  using set::log; \
  using set::log10; \
  using set::log2; \
  using set::max; \
  using set::max3; \
  using set::median3; \
  using set::min; \
  using set::min3; \
  using set::mix; \
  using set::pow; \
  using set::powr; \
  using set::rint; \
  using set::round; \
  using set::rsqrt; \
  using set::saturate; \
  using set::sign; \
  using set::sin; \
  using set::sinh; \
  using set::sinpi; \
  using set::smoothstep; \
  using set::sqrt; \
  using set::step; \
  using set::tan; \
  using set::tanh; \
  using set::tanpi; \
  using set::trunc;
#define LILY_USING_OTHERS \
  using lily::math::faceforward; \
  using lily::math::frexp; \
  using lily::math::ilogb; \
  using lily::math::ldexp; \
  using lily::math::modf; \
  using lily::math::nextafter; \
  using lily::math::normalize; \
  using lily::math::reflect; \
  using lily::math::refract; \
  using lily::math::sincos;

#ifdef LILY_STRICT
#include "overloads.h"
#define LILY_TYPED lily::strict
#else
#define LILY_TYPED lily::math
#endif

namespace metal {
LILY_USING_TYPED(LILY_TYPED)
LILY_USING_OTHERS
namespace fast {
LILY_USING_TYPED(lily::math)
LILY_USING_OTHERS
}
namespace precise {
LILY_USING_TYPED(lily::math)
LILY_USING_OTHERS
}

// Relations.
#ifdef LILY_STRICT
#define LILY_RELATION(name, result) \
  constexpr bool name(float x) { \
    return result; \
  } \
  constexpr bool name(half x) { \
    return name(float(x)); \
  } \
  template <lily::Bfloat T> \
  constexpr bool name(T x) { \
    return name(float(x)); \
  } \
  template <lily::Vector V> \
    requires(lily::is_real<lily::element_t<V>>) \
  constexpr auto name(V v) { \
    return lily::lift([](auto x) { return name(x); }, v); \
  }
#else
#define LILY_RELATION(name, result) \
  template <lily::Scalar T> \
  constexpr bool name(T x0) { \
    float x = float(x0); \
    return result; \
  } \
  template <lily::Vector V> \
  constexpr auto name(V v) { \
    return lily::lift([](auto x) { return name(x); }, v); \
  }
#endif
LILY_RELATION(isnan, __builtin_isnan(x))
LILY_RELATION(isinf, __builtin_isinf(x) != 0)
LILY_RELATION(isfinite, __builtin_isfinite(x))
LILY_RELATION(signbit, __builtin_signbit(x) != 0)
#undef LILY_RELATION
template <lily::Scalar T>
constexpr bool isnormal(T x) {
  auto magnitude = abs(float(x));
  return magnitude >= float(numeric_limits<T>::min()) && magnitude <= float(numeric_limits<T>::max());
}
template <lily::Vector V>
constexpr auto isnormal(V v) {
  return lily::lift([](auto x) { return isnormal(x); }, v);
}
template <lily::Scalar A, lily::Scalar B>
constexpr bool isunordered(A x, B y) {
  return isnan(x) || isnan(y);
}
template <lily::Scalar A, lily::Scalar B>
constexpr bool isordered(A x, B y) {
  return !isunordered(x, y);
}
LILY_LIFT_2(isunordered)
LILY_LIFT_2(isordered)

constexpr bool any(bool x) {
  return x;
}
constexpr bool all(bool x) {
  return x;
}
template <lily::Vector V>
constexpr bool any(V v) {
  bool found = false;
  for (int i = 0; i < lily::size_of<V>; ++i) {
    found = found || bool(v.v[i]);
  }
  return found;
}
template <lily::Vector V>
constexpr bool all(V v) {
  bool held = true;
  for (int i = 0; i < lily::size_of<V>; ++i) {
    held = held && bool(v.v[i]);
  }
  return held;
}
#ifdef LILY_STRICT
using lily::strict::rotate;
using lily::strict::select;
#else
template <typename T>
constexpr T select(T a, T b, bool c) {
  return c ? b : a;
}
template <lily::Scalar A, lily::Scalar B>
  requires(!__is_same(A, B))
constexpr auto select(A a, B b, bool c) {
  using T = lily::common_t<A, B>;
  return c ? T(b) : T(a);
}
template <typename A, typename B, lily::Vector C>
constexpr auto select(A a, B b, C c) {
  using V = typename lily::first_vector<A, B>::type;
  using T = lily::element_t<V>;
  vec<T, lily::size_of<C>> out{};
  for (int i = 0; i < lily::size_of<C>; ++i) {
    out.v[i] = bool(c.v[i]) ? lily::element<T>(b, i) : lily::element<T>(a, i);
  }
  return out;
}
#endif

// Integers.
template <lily::Integer T>
LILY_WRAPS constexpr T popcount(T x) {
  return T(__builtin_popcountl(ulong(make_unsigned_t<T>(x))));
}
template <lily::Integer T>
LILY_WRAPS constexpr T clz(T x) {
  constexpr int bits = int(sizeof(T)) * 8;
  auto u = ulong(make_unsigned_t<T>(x));
  return u == 0 ? T(bits) : T(__builtin_clzl(u) - (64 - bits));
}
template <lily::Integer T>
LILY_WRAPS constexpr T ctz(T x) {
  auto u = ulong(make_unsigned_t<T>(x));
  return u == 0 ? T(sizeof(T) * 8) : T(__builtin_ctzl(u));
}
template <lily::Integer T>
LILY_WRAPS constexpr T reverse_bits(T x) {
  auto u = ulong(make_unsigned_t<T>(x));
  ulong out = 0;
  for (size_t i = 0; i < sizeof(T) * 8; ++i) {
    out = (out << 1) | ((u >> i) & 1);
  }
  return T(out);
}
template <lily::Integer T>
LILY_WRAPS constexpr T mulhi(T x, T y) {
  return T((__int128(x) * __int128(y)) >> (sizeof(T) * 8));
}
template <>
LILY_WRAPS constexpr ulong mulhi(ulong x, ulong y) {
  return ulong((static_cast<unsigned __int128>(x) * y) >> 64);
}
template <lily::Integer T>
LILY_WRAPS constexpr T madhi(T x, T y, T z) {
  return T(mulhi(x, y) + z);
}
template <lily::Integer T>
LILY_WRAPS constexpr T addsat(T x, T y) {
  T sum;
  bool over = __builtin_add_overflow(x, y, &sum);
  return over ? (y < T(0) ? numeric_limits<T>::min() : numeric_limits<T>::max()) : sum;
}
template <lily::Integer T>
LILY_WRAPS constexpr T subsat(T x, T y) {
  T difference;
  bool over = __builtin_sub_overflow(x, y, &difference);
  bool above = numeric_limits<T>::is_signed && y < T(0);
  return !over ? difference : above ? numeric_limits<T>::max() : numeric_limits<T>::min();
}
template <lily::Integer T>
LILY_WRAPS constexpr T madsat(T x, T y, T z) {
  __int128 exact = __int128(x) * y + z;
  __int128 low = numeric_limits<T>::min(), high = numeric_limits<T>::max();
  return T(exact < low ? low : exact > high ? high : exact);
}
template <lily::Integer T>
LILY_WRAPS constexpr auto absdiff(T x, T y) {
  using U = make_unsigned_t<T>;
  return x < y ? U(U(y) - U(x)) : U(U(x) - U(y));
}
template <lily::Integer T>
LILY_WRAPS constexpr T hadd(T x, T y) {
  return T((__int128(x) + y) >> 1);
}
template <lily::Integer T>
LILY_WRAPS constexpr T rhadd(T x, T y) {
  return T((__int128(x) + y + 1) >> 1);
}
template <lily::Integer T>
LILY_WRAPS constexpr T mul24(T x, T y) {
  return T(x * y);
}
template <lily::Integer T>
LILY_WRAPS constexpr T mad24(T x, T y, T z) {
  return T(x * y + z);
}
#ifndef LILY_STRICT
template <lily::Integer A, lily::Integer B>
LILY_WRAPS constexpr A rotate(A x, B by) {
  using U = make_unsigned_t<A>;
  constexpr unsigned bits = sizeof(A) * 8;
  unsigned n = unsigned(by) % bits;
  return n == 0 ? x : A(U(U(x) << n) | U(U(x) >> (bits - n)));
}
#endif
template <lily::Integer T>
LILY_WRAPS constexpr T extract_bits(T x, uint offset, uint bits) {
  if (bits == 0) {
    return T(0);
  }
  constexpr uint width = sizeof(T) * 8;
  auto left = make_unsigned_t<T>(make_unsigned_t<T>(x) << (width - bits - offset));
  return T(T(left) >> (width - bits));
}
template <lily::Integer T>
LILY_WRAPS constexpr T insert_bits(T base, T insert, uint offset, uint bits) {
  ulong mask = (bits >= 64 ? ~0ul : (1ul << bits) - 1) << offset;
  return T((ulong(base) & ~mask) | ((ulong(insert) << offset) & mask));
}
#define LILY_LIFT_1(name) \
  template <lily::Vector V> \
  constexpr auto name(V v) { \
    return lily::lift([](auto x) { return name(x); }, v); \
  }
LILY_LIFT_1(popcount)
LILY_LIFT_1(clz)
LILY_LIFT_1(ctz)
LILY_LIFT_1(reverse_bits)
LILY_LIFT_2(mulhi)
LILY_LIFT_2(addsat)
LILY_LIFT_2(subsat)
LILY_LIFT_2(absdiff)
LILY_LIFT_2(hadd)
LILY_LIFT_2(rhadd)
LILY_LIFT_2(mul24)
#ifndef LILY_STRICT
LILY_LIFT_2(rotate)
#endif
LILY_LIFT_3(madhi)
LILY_LIFT_3(madsat)
LILY_LIFT_3(mad24)
template <lily::Vector V>
constexpr auto extract_bits(V v, uint offset, uint bits) {
  return lily::lift([=](auto x) { return extract_bits(x, offset, bits); }, v);
}
template <lily::Vector V>
constexpr auto insert_bits(V base, V insert, uint offset, uint bits) {
  return lily::lift([=](auto x, auto y) { return insert_bits(x, y, offset, bits); }, base, insert);
}

// Packing. Conversions to normalised integers clamp, scale and round to nearest even.
inline uint pack_float_to_unorm4x8(float4 x) {
  uint out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= uint(rint(saturate(x.v[i]) * 255.0f)) << (8 * i);
  }
  return out;
}
inline uint pack_float_to_snorm4x8(float4 x) {
  uint out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= (uint(int(rint(clamp(x.v[i], -1.0f, 1.0f) * 127.0f))) & 255u) << (8 * i);
  }
  return out;
}
inline uint pack_float_to_unorm2x16(float2 x) {
  return uint(rint(saturate(x.x) * 65535.0f)) | uint(rint(saturate(x.y) * 65535.0f)) << 16;
}
inline uint pack_float_to_snorm2x16(float2 x) {
  return (uint(int(rint(clamp(x.x, -1.0f, 1.0f) * 32767.0f))) & 65535u) |
      (uint(int(rint(clamp(x.y, -1.0f, 1.0f) * 32767.0f))) & 65535u) << 16;
}
inline float4 unpack_unorm4x8_to_float(uint x) {
  return float4(x & 255u, (x >> 8) & 255u, (x >> 16) & 255u, x >> 24) / 255.0f;
}
inline float4 unpack_snorm4x8_to_float(uint x) {
  float4 parts(int8_t(x), int8_t(x >> 8), int8_t(x >> 16), int8_t(x >> 24));
  return max(parts / 127.0f, -1.0f);
}
inline float2 unpack_unorm2x16_to_float(uint x) {
  return float2(x & 65535u, x >> 16) / 65535.0f;
}
inline float2 unpack_snorm2x16_to_float(uint x) {
  return max(float2(short(x), short(x >> 16)) / 32767.0f, -1.0f);
}
// Colours: red is in the lowest bits of 10a2 and in the highest of 565.
inline uint pack_float_to_unorm10a2(float4 x) {
  uint4 parts(rint(saturate(x) * float4(1023, 1023, 1023, 3)));
  return parts.x | parts.y << 10 | parts.z << 20 | parts.w << 30;
}
inline float4 unpack_unorm10a2_to_float(uint x) {
  return float4(x & 1023u, (x >> 10) & 1023u, (x >> 20) & 1023u, x >> 30) / float4(1023, 1023, 1023, 3);
}
inline ushort pack_float_to_unorm565(float3 x) {
  uint3 parts(rint(saturate(x) * float3(31, 63, 31)));
  return ushort(parts.x << 11 | parts.y << 5 | parts.z);
}
inline float3 unpack_unorm565_to_float(ushort x) {
  return float3(x >> 11, (x >> 5) & 63, x & 31) / float3(31, 63, 31);
}
inline uint pack_float_to_srgb_unorm4x8(float4 x) {
  for (int i = 0; i < 3; ++i) {
    float v = saturate(x.v[i]);
    x.v[i] = v <= 0.0031308f ? 12.92f * v : 1.055f * pow(v, 1.0f / 2.4f) - 0.055f;
  }
  return pack_float_to_unorm4x8(x);
}
inline float4 unpack_unorm4x8_srgb_to_float(uint x) {
  float4 out = unpack_unorm4x8_to_float(x);
  for (int i = 0; i < 3; ++i) {
    float v = out.v[i];
    out.v[i] = v <= 0.04045f ? v / 12.92f : pow((v + 0.055f) / 1.055f, 2.4f);
  }
  return out;
}
#define LILY_PACK_HALF(packed_t, N, name) \
  inline packed_t pack_half_to_##name(half##N x) { \
    return pack_float_to_##name(float##N(x)); \
  }
#define LILY_UNPACK_HALF(packed_t, N, name) \
  inline half##N unpack_##name##_to_half(packed_t x) { \
    return half##N(unpack_##name##_to_float(x)); \
  }
LILY_PACK_HALF(uint, 4, unorm4x8)
LILY_PACK_HALF(uint, 4, snorm4x8)
LILY_PACK_HALF(uint, 4, srgb_unorm4x8)
LILY_PACK_HALF(uint, 4, unorm10a2)
LILY_PACK_HALF(uint, 2, unorm2x16)
LILY_PACK_HALF(uint, 2, snorm2x16)
LILY_PACK_HALF(ushort, 3, unorm565)
LILY_UNPACK_HALF(uint, 4, unorm4x8)
LILY_UNPACK_HALF(uint, 4, snorm4x8)
LILY_UNPACK_HALF(uint, 4, unorm4x8_srgb)
LILY_UNPACK_HALF(uint, 4, unorm10a2)
LILY_UNPACK_HALF(uint, 2, unorm2x16)
LILY_UNPACK_HALF(uint, 2, snorm2x16)
LILY_UNPACK_HALF(ushort, 3, unorm565)
#undef LILY_PACK_HALF
#undef LILY_UNPACK_HALF

} // namespace metal

#pragma clang diagnostic pop

#undef LILY_MATH_1
#undef LILY_MATH_2
#undef LILY_MATH_3
#undef LILY_LIFT_1
#undef LILY_LIFT_2
#undef LILY_LIFT_3
#undef LILY_USING_TYPED
#undef LILY_USING_OTHERS
#undef LILY_TYPED

// The compiler's own names for these functions, which MLX's bfloat overloads call; `fast` says which
// precision.
#define LILY_BUILTIN_1(name) \
  template <typename T> \
  inline auto __metal_##name(T x, bool = true) { \
    return metal::name(x); \
  }
#define LILY_BUILTIN_2(name) \
  template <typename T> \
  inline auto __metal_##name(T x, T y, bool = true) { \
    return metal::name(x, y); \
  }
#define LILY_BUILTIN_3(name) \
  template <typename T> \
  inline auto __metal_##name(T x, T y, T z, bool = true) { \
    return metal::name(x, y, z); \
  }
LILY_BUILTIN_1(acos)
LILY_BUILTIN_1(acosh)
LILY_BUILTIN_1(asin)
LILY_BUILTIN_1(asinh)
LILY_BUILTIN_1(atan)
LILY_BUILTIN_1(atanh)
LILY_BUILTIN_1(ceil)
LILY_BUILTIN_1(cos)
LILY_BUILTIN_1(cosh)
LILY_BUILTIN_1(cospi)
LILY_BUILTIN_1(exp)
LILY_BUILTIN_1(exp2)
LILY_BUILTIN_1(exp10)
LILY_BUILTIN_1(fabs)
LILY_BUILTIN_1(floor)
LILY_BUILTIN_1(fract)
LILY_BUILTIN_1(log)
LILY_BUILTIN_1(log10)
LILY_BUILTIN_1(log2)
LILY_BUILTIN_1(rint)
LILY_BUILTIN_1(round)
LILY_BUILTIN_1(rsqrt)
LILY_BUILTIN_1(sin)
LILY_BUILTIN_1(sinh)
LILY_BUILTIN_1(sinpi)
LILY_BUILTIN_1(sqrt)
LILY_BUILTIN_1(tan)
LILY_BUILTIN_1(tanh)
LILY_BUILTIN_1(tanpi)
LILY_BUILTIN_1(trunc)
LILY_BUILTIN_2(atan2)
LILY_BUILTIN_2(divide)
LILY_BUILTIN_2(fmax)
LILY_BUILTIN_2(fmin)
LILY_BUILTIN_2(fmod)
LILY_BUILTIN_2(nextafter)
LILY_BUILTIN_2(pow)
LILY_BUILTIN_2(powr)
LILY_BUILTIN_3(fma)
LILY_BUILTIN_3(fmax3)
LILY_BUILTIN_3(fmin3)
LILY_BUILTIN_3(fmedian3)
#undef LILY_BUILTIN_1
#undef LILY_BUILTIN_2
#undef LILY_BUILTIN_3
inline float __metal_ldexp(float x, int k, bool = true) {
  return metal::ldexp(x, k);
}
inline float __metal_frexp(float x, int* exponent) {
  return metal::frexp(x, *exponent);
}
