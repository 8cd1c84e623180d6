// Metal's overload sets, for the strict pass: a function is declared once for every type that it takes, so a
// call whose arguments differ in type is ambiguous exactly where none of them fits best (max(int, uint),
// max(half, float), sqrt(int)), and pow(float, int) is not. The lenient templates of math.h stay in metal::fast
// and metal::precise, which have functions of float alone, so that nothing is ambiguous there.
//
// A bfloat is a float to these functions and no float becomes a bfloat: templates take what has a bfloat in it,
// so that MLX's own overloads for bfloat, which are none, come first.
#pragma once
#pragma clang system_header

namespace lily {

template <typename T>
concept Bfloat = bool(__is_same(T, bfloat));
// Reals, one of them bfloat.
template <typename... T>
concept MeetsBfloat = (is_real<T> && ...) && (Bfloat<T> || ...);

} // namespace lily

#define LILY_SET_1(name, T) \
  constexpr T name(T x) { \
    return lily::math::name(x); \
  } \
  T##2 name(T##2); \
  T##3 name(T##3); \
  T##4 name(T##4);
#define LILY_SET_2(name, T) \
  constexpr T name(T x, T y) { \
    return lily::math::name(x, y); \
  } \
  T##2 name(T##2, T##2); \
  T##3 name(T##3, T##3); \
  T##4 name(T##4, T##4);
#define LILY_SET_3(name, T) \
  constexpr T name(T x, T y, T z) { \
    return lily::math::name(x, y, z); \
  } \
  T##2 name(T##2, T##2, T##2); \
  T##3 name(T##3, T##3, T##3); \
  T##4 name(T##4, T##4, T##4);
#define LILY_REAL_1(name) \
  LILY_SET_1(name, float) \
  LILY_SET_1(name, half) \
  template <lily::Bfloat T> \
  constexpr float name(T x) { \
    return name(float(x)); \
  }
#define LILY_REAL_2(name) \
  LILY_SET_2(name, float) \
  LILY_SET_2(name, half) \
  template <typename A, typename B> \
    requires(lily::MeetsBfloat<A, B>) \
  constexpr float name(A x, B y) { \
    return name(float(x), float(y)); \
  }
#define LILY_REAL_3(name) \
  LILY_SET_3(name, float) \
  LILY_SET_3(name, half) \
  template <typename A, typename B, typename C> \
    requires(lily::MeetsBfloat<A, B, C>) \
  constexpr float name(A x, B y, C z) { \
    return name(float(x), float(y), float(z)); \
  }
#define LILY_INTEGERS(set, name) \
  set(name, char) set(name, uchar) set(name, short) set(name, ushort) set(name, int) set(name, uint) \
      set(name, long) set(name, ulong)
#define LILY_DOT(name, T, result) \
  result name(T##2, T##2); \
  result name(T##3, T##3); \
  result name(T##4, T##4);
#define LILY_LENGTH(name, T, result) \
  result name(T##2); \
  result name(T##3); \
  result name(T##4);
#define LILY_SELECT(name, T) \
  constexpr T name(T a, T b, bool c) { \
    return c ? b : a; \
  } \
  T##2 name(T##2, T##2, bool2); \
  T##3 name(T##3, T##3, bool3); \
  T##4 name(T##4, T##4, bool4);
#define LILY_ROTATE(name, T) \
  T name(T, T); \
  T##2 name(T##2, T##2); \
  T##3 name(T##3, T##3); \
  T##4 name(T##4, T##4);

namespace lily::strict {

LILY_REAL_1(acos)
LILY_REAL_1(acosh)
LILY_REAL_1(asin)
LILY_REAL_1(asinh)
LILY_REAL_1(atan)
LILY_REAL_1(atanh)
LILY_REAL_1(ceil)
LILY_REAL_1(cos)
LILY_REAL_1(cosh)
LILY_REAL_1(cospi)
LILY_REAL_1(exp)
LILY_REAL_1(exp2)
LILY_REAL_1(exp10)
LILY_REAL_1(fabs)
LILY_REAL_1(floor)
LILY_REAL_1(fract)
LILY_REAL_1(log)
LILY_REAL_1(log10)
LILY_REAL_1(log2)
LILY_REAL_1(rint)
LILY_REAL_1(round)
LILY_REAL_1(rsqrt)
LILY_REAL_1(sin)
LILY_REAL_1(sinh)
LILY_REAL_1(sinpi)
LILY_REAL_1(sqrt)
LILY_REAL_1(tan)
LILY_REAL_1(tanh)
LILY_REAL_1(tanpi)
LILY_REAL_1(trunc)
LILY_REAL_1(saturate)
LILY_REAL_1(sign)
LILY_REAL_2(atan2)
LILY_REAL_2(copysign)
LILY_REAL_2(divide)
LILY_REAL_2(fdim)
LILY_REAL_2(fmax)
LILY_REAL_2(fmin)
LILY_REAL_2(fmod)
LILY_REAL_2(pow)
LILY_REAL_2(powr)
LILY_REAL_2(step)
LILY_REAL_3(fma)
LILY_REAL_3(fmax3)
LILY_REAL_3(fmin3)
LILY_REAL_3(fmedian3)
LILY_REAL_3(mix)
LILY_REAL_3(smoothstep)
LILY_REAL_1(abs)
LILY_INTEGERS(LILY_SET_1, abs)
LILY_REAL_2(max)
LILY_INTEGERS(LILY_SET_2, max)
LILY_REAL_2(min)
LILY_INTEGERS(LILY_SET_2, min)
LILY_REAL_3(clamp)
LILY_INTEGERS(LILY_SET_3, clamp)
LILY_REAL_3(max3)
LILY_INTEGERS(LILY_SET_3, max3)
LILY_REAL_3(min3)
LILY_INTEGERS(LILY_SET_3, min3)
LILY_REAL_3(median3)
LILY_INTEGERS(LILY_SET_3, median3)
LILY_DOT(dot, float, float)
LILY_DOT(dot, half, half)
LILY_DOT(distance, float, float)
LILY_DOT(distance, half, half)
LILY_DOT(distance_squared, float, float)
LILY_DOT(distance_squared, half, half)
LILY_LENGTH(length, float, float)
LILY_LENGTH(length, half, half)
LILY_LENGTH(length_squared, float, float)
LILY_LENGTH(length_squared, half, half)
float3 cross(float3, float3);
half3 cross(half3, half3);
LILY_SELECT(select, bool)
LILY_SELECT(select, half)
LILY_SELECT(select, float)
LILY_INTEGERS(LILY_SELECT, select)
LILY_SELECT(select, bfloat)
LILY_INTEGERS(LILY_ROTATE, rotate)

} // namespace lily::strict

#undef LILY_SET_1
#undef LILY_SET_2
#undef LILY_SET_3
#undef LILY_REAL_1
#undef LILY_REAL_2
#undef LILY_REAL_3
#undef LILY_INTEGERS
#undef LILY_DOT
#undef LILY_LENGTH
#undef LILY_SELECT
#undef LILY_ROTATE
