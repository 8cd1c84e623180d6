// Scalar types, limits, type traits and casts of the Metal Shading Language.
//
// No C or C++ header is included anywhere below: their ::abs, select or hypot would collide with the names
// that a Metal source defines. Two ways to compile, chosen by lily_mlx.launch.msl.rewrite:
//   host    address spaces are gone, everything runs;
//   strict  (LILY_STRICT) address spaces are real types, nothing runs.
#pragma once
#pragma clang system_header

#include "../../../hostrt/runtime.h"

#ifndef __METAL_VERSION__
#define __METAL_VERSION__ 400
#endif
#define __METAL__ 1
#if __METAL_VERSION__ >= 310 && !defined(__HAVE_BFLOAT__)
#define __HAVE_BFLOAT__ 1
#endif
#define METAL_FUNC inline

// What is in constant memory is constant; `constant const int*` says so twice.
#pragma clang diagnostic ignored "-Wduplicate-decl-specifier"
#ifdef LILY_STRICT
#define LILY_AS_device __attribute__((address_space(1)))
#define LILY_AS_constant __attribute__((address_space(2))) const
#define LILY_AS_threadgroup __attribute__((address_space(3)))
#endif

// Integer arithmetic that wraps on the GPU and means to: not for the launcher's overflow checks.
#define LILY_WRAPS __attribute__((no_sanitize("integer")))

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __INTPTR_TYPE__ intptr_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef _Float16 half;
typedef __bf16 bfloat;

#ifndef LILY_STRICT
// x86 has no instruction for float to bfloat, so the compiler calls this; a definition here keeps the object
// independent of the age of libgcc. Round to nearest even, NaN stays NaN.
extern "C" __attribute__((weak, visibility("hidden"))) bfloat __truncsfbf2(float x) {
  uint bits = __builtin_bit_cast(uint, x);
  bits = (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
  return __builtin_bit_cast(bfloat, ushort(bits >> 16));
}
#endif

#define NULL __null

#define CHAR_BIT 8
#define SCHAR_MAX 127
#define SCHAR_MIN (-128)
#define UCHAR_MAX 255
#define CHAR_MAX SCHAR_MAX
#define CHAR_MIN SCHAR_MIN
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define LONG_MIN (-9223372036854775807l - 1)
#define ULONG_MAX 18446744073709551615ul
#define INT8_MAX SCHAR_MAX
#define INT8_MIN SCHAR_MIN
#define UINT8_MAX UCHAR_MAX
#define INT16_MAX SHRT_MAX
#define INT16_MIN SHRT_MIN
#define UINT16_MAX USHRT_MAX
#define INT32_MAX INT_MAX
#define INT32_MIN INT_MIN
#define UINT32_MAX UINT_MAX
#define INT64_MAX LONG_MAX
#define INT64_MIN LONG_MIN
#define UINT64_MAX ULONG_MAX
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define FLT_MAX_10_EXP 38
#define FLT_MAX_EXP 128
#define FLT_MIN_10_EXP (-37)
#define FLT_MIN_EXP (-125)
#define FLT_RADIX 2
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1p-126f
#define FLT_EPSILON 0x1p-23f
#define FLT_DECIMAL_DIG 9
#define HALF_DIG 3
#define HALF_MANT_DIG 11
#define HALF_MAX_10_EXP 4
#define HALF_MAX_EXP 16
#define HALF_MIN_10_EXP (-4)
#define HALF_MIN_EXP (-13)
#define HALF_RADIX 2
#define HALF_MAX half(0x1.ffcp15f)
#define HALF_MIN half(0x1p-14f)
#define HALF_EPSILON half(0x1p-10f)
#define HALF_DECIMAL_DIG 5
#define BFLT_DIG 2
#define BFLT_MANT_DIG 8
#define BFLT_MAX_10_EXP 38
#define BFLT_MAX_EXP 128
#define BFLT_MIN_10_EXP (-37)
#define BFLT_MIN_EXP (-125)
#define BFLT_RADIX 2
#define BFLT_DECIMAL_DIG 4
#define BFLT_MAX bfloat(0x1.fep127f)
#define BFLT_MIN bfloat(0x1p-126f)
#define BFLT_EPSILON bfloat(0x1p-7f)
#define MAXFLOAT FLT_MAX
#define MAXHALF HALF_MAX
#define MAXBFLOAT BFLT_MAX
#define HUGE_VALF __builtin_huge_valf()
#define HUGE_VALH half(__builtin_huge_valf())
#define HUGE_VALBF bfloat(__builtin_huge_valf())
#define INFINITY __builtin_huge_valf()
#define NAN __builtin_nanf("")
#define FP_ILOGB0 INT_MIN
#define FP_ILOGBNAN INT_MIN
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.78539816339744830962f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_E_H half(M_E_F)
#define M_LOG2E_H half(M_LOG2E_F)
#define M_LOG10E_H half(M_LOG10E_F)
#define M_LN2_H half(M_LN2_F)
#define M_LN10_H half(M_LN10_F)
#define M_PI_H half(M_PI_F)
#define M_PI_2_H half(M_PI_2_F)
#define M_PI_4_H half(M_PI_4_F)
#define M_1_PI_H half(M_1_PI_F)
#define M_2_PI_H half(M_2_PI_F)
#define M_2_SQRTPI_H half(M_2_SQRTPI_F)
#define M_SQRT2_H half(M_SQRT2_F)
#define M_SQRT1_2_H half(M_SQRT1_2_F)
#define M_E_BF bfloat(M_E_F)
#define M_LOG2E_BF bfloat(M_LOG2E_F)
#define M_LOG10E_BF bfloat(M_LOG10E_F)
#define M_LN2_BF bfloat(M_LN2_F)
#define M_LN10_BF bfloat(M_LN10_F)
#define M_PI_BF bfloat(M_PI_F)
#define M_PI_2_BF bfloat(M_PI_2_F)
#define M_PI_4_BF bfloat(M_PI_4_F)
#define M_1_PI_BF bfloat(M_1_PI_F)
#define M_2_PI_BF bfloat(M_2_PI_F)
#define M_2_SQRTPI_BF bfloat(M_2_SQRTPI_F)
#define M_SQRT2_BF bfloat(M_SQRT2_F)
#define M_SQRT1_2_BF bfloat(M_SQRT1_2_F)

#ifdef LILY_STRICT
// Copies of X between address spaces; templates, so that X stays trivially copyable. An aggregate gets assignments
// only and stays one: clang's complaint that it has no constructor for the copy is for strict.py to drop.
#define LILY_AGGREGATE(X) \
  template <typename From> \
    requires(lily::Elsewhere<From, X>) \
  X& operator=(const From&); \
  template <typename Self> \
    requires(lily::Elsewhere<Self, X>) \
  void operator=(this Self&, X);
#define LILY_CLASS(X) \
  template <typename From> \
    requires(lily::Elsewhere<From, X>) \
  X(const From&); \
  LILY_AGGREGATE(X)
// A class inside a function has no member templates.
#define LILY_LOCAL_CLASS(X) \
  X& operator=(const X&) = default; \
  X& operator=(const LILY_AS_device X&); \
  X& operator=(const LILY_AS_constant X&); \
  X& operator=(const LILY_AS_threadgroup X&); \
  void operator=(this LILY_AS_device X&, X); \
  void operator=(this LILY_AS_threadgroup X&, X);
#endif

namespace metal {

template <typename T, T v>
struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const noexcept {
    return v;
  }
  constexpr T operator()() const noexcept {
    return v;
  }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool c, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  using type = T;
};
template <bool c, typename T = void>
using enable_if_t = typename enable_if<c, T>::type;

template <bool c, typename A, typename B>
struct conditional {
  using type = A;
};
template <typename A, typename B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool c, typename A, typename B>
using conditional_t = typename conditional<c, A, B>::type;

template <typename A, typename B>
constexpr bool is_same_v = __is_same(A, B);
template <typename A, typename B>
struct is_same : bool_constant<__is_same(A, B)> {};

// The unqualified type; in the strict pass that drops the address space as well.
template <typename T>
struct remove_addrspace {
  using type = T;
};
template <typename T>
struct remove_addrspace<T&> {
  using type = typename remove_addrspace<T>::type&;
};
#ifdef LILY_STRICT
template <typename T>
struct remove_addrspace<LILY_AS_device T> {
  using type = T;
};
template <typename T>
struct remove_addrspace<const LILY_AS_device T> {
  using type = const T;
};
template <typename T>
struct remove_addrspace<LILY_AS_threadgroup T> {
  using type = T;
};
template <typename T>
struct remove_addrspace<const LILY_AS_threadgroup T> {
  using type = const T;
};
template <typename T>
struct remove_addrspace<LILY_AS_constant T> {
  using type = const T;
};
#endif
template <typename T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

#define LILY_TRANSFORM(name) \
  template <typename T> \
  using name##_t = __##name(T); \
  template <typename T> \
  struct name { \
    using type = __##name(T); \
  };
LILY_TRANSFORM(remove_const)
LILY_TRANSFORM(remove_volatile)
LILY_TRANSFORM(remove_cv)
LILY_TRANSFORM(remove_pointer)
LILY_TRANSFORM(remove_extent)
LILY_TRANSFORM(remove_all_extents)
LILY_TRANSFORM(decay)
LILY_TRANSFORM(add_pointer)
#undef LILY_TRANSFORM
template <typename T>
using remove_reference_t = __remove_reference_t(T);
template <typename T>
struct remove_reference {
  using type = __remove_reference_t(T);
};
template <typename T>
using remove_cvref_t = __remove_cvref(T);
template <typename T>
struct remove_cvref {
  using type = __remove_cvref(T);
};
template <typename T>
struct add_const {
  using type = const T;
};
template <typename T>
using add_const_t = const T;
template <typename T>
using add_lvalue_reference_t = __add_lvalue_reference(T);
template <typename T>
using add_rvalue_reference_t = __add_rvalue_reference(T);
template <typename T>
struct type_identity {
  using type = T;
};
template <typename T>
using type_identity_t = T;

template <typename T>
__add_rvalue_reference(T) declval() noexcept;

} // namespace metal

namespace lily {

// A plain value type: no reference, qualifiers or address space.
template <typename T>
using plain = __remove_cv(metal::remove_addrspace_t<__remove_reference_t(T)>);

template <typename T>
constexpr bool is_real =
    __is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat) || __is_same(T, double);
template <typename T>
constexpr bool is_scalar = is_real<T> || __is_integral(T);

template <typename T>
concept Scalar = is_scalar<plain<T>>;
template <typename T>
concept Real = is_real<plain<T>>;
template <typename T>
concept Integer = bool(__is_integral(plain<T>));

// What the built-in operators make of two scalars; half and bfloat meet in float.
template <typename A, typename B>
struct common {
  using type = decltype(A() + B());
};
template <typename A>
struct common<A, A> {
  using type = A;
};
template <>
struct common<half, bfloat> {
  using type = float;
};
template <>
struct common<bfloat, half> {
  using type = float;
};
template <typename A, typename B>
using common_t = typename common<plain<A>, plain<B>>::type;

// static_cast as Metal has it. Clang refuses one between half and bfloat, which Metal performs through float.
template <typename To, typename From>
LILY_RT_INLINE constexpr To cast(From&& from) {
  if constexpr (
      (__is_same(__remove_cv(To), half) && __is_same(plain<From>, bfloat)) ||
      (__is_same(__remove_cv(To), bfloat) && __is_same(plain<From>, half))) {
    return static_cast<To>(static_cast<float>(from));
  } else {
    return static_cast<To>(static_cast<From&&>(from));
  }
}

// T(a, b, ...) where T is a template parameter of the source and may be half or bfloat.
template <typename T, typename... A>
LILY_RT_INLINE constexpr T make(A&&... a) {
  if constexpr (sizeof...(A) == 1 && is_scalar<T>) {
    return cast<T>(static_cast<A&&>(a)...);
  } else {
    return T(static_cast<A&&>(a)...);
  }
}

#ifdef LILY_STRICT
struct anywhere {
  template <typename T>
  operator T&() const;
};
// `decay{}, x` is x, or a copy of it if it is an object of class type in a named address space.
struct decay {
  template <typename T>
  constexpr decltype(auto) operator,(T&& x) const {
    if constexpr (__is_class(plain<T>) && !__is_same(__remove_cv(__remove_reference_t(T)), plain<T>)) {
      return plain<T>(x);
    } else if constexpr (__is_lvalue_reference(T)) {
      return x;
    } else {
      return T(static_cast<T&&>(x));
    }
  }
};
template <typename T>
constexpr bool is_device = false;
template <typename T>
constexpr bool is_device<LILY_AS_device T> = true;
template <typename T>
constexpr bool is_threadgroup = false;
template <typename T>
constexpr bool is_threadgroup<LILY_AS_threadgroup T> = true;
// Where an object of type T, const or not, is.
template <typename T>
constexpr bool in_device = is_device<__remove_cv(T)>;
template <typename T>
constexpr bool in_threadgroup = is_threadgroup<__remove_cv(T)>;
// T is the class X in an address space.
template <typename T, typename X>
concept Elsewhere = bool(__is_same(plain<T>, X)) && !__is_same(__remove_cv(T), X);
#endif

} // namespace lily

namespace metal {

#define LILY_TRAIT(name, ...) \
  template <typename T> \
  constexpr bool name##_v = __VA_ARGS__; \
  template <typename T> \
  struct name : bool_constant<bool(__VA_ARGS__)> {};
LILY_TRAIT(is_integral, __is_integral(__remove_cv(remove_addrspace_t<T>)))
LILY_TRAIT(is_floating_point, lily::is_real<__remove_cv(remove_addrspace_t<T>)>)
LILY_TRAIT(is_arithmetic, lily::is_scalar<__remove_cv(remove_addrspace_t<T>)>)
LILY_TRAIT(is_scalar, lily::is_scalar<__remove_cv(remove_addrspace_t<T>)> || __is_enum(T) || __is_pointer(T))
LILY_TRAIT(is_void, __is_void(T))
LILY_TRAIT(is_signed, lily::is_real<__remove_cv(T)> || __is_signed(T))
LILY_TRAIT(is_unsigned, __is_unsigned(T))
LILY_TRAIT(is_pointer, __is_pointer(T))
LILY_TRAIT(is_reference, __is_reference(T))
LILY_TRAIT(is_lvalue_reference, __is_lvalue_reference(T))
LILY_TRAIT(is_rvalue_reference, __is_rvalue_reference(T))
LILY_TRAIT(is_array, __is_array(T))
LILY_TRAIT(is_const, __is_const(T))
LILY_TRAIT(is_enum, __is_enum(T))
LILY_TRAIT(is_class, __is_class(T))
LILY_TRAIT(is_union, __is_union(T))
LILY_TRAIT(is_function, __is_function(T))
LILY_TRAIT(is_trivially_copyable, __is_trivially_copyable(T))
LILY_TRAIT(is_trivial, __is_trivially_copyable(T) && __is_trivially_constructible(T))
LILY_TRAIT(is_default_constructible, __is_constructible(T))
#undef LILY_TRAIT
#define LILY_TRAIT2(name, builtin) \
  template <typename A, typename B> \
  constexpr bool name##_v = builtin(A, B); \
  template <typename A, typename B> \
  struct name : bool_constant<builtin(A, B)> {};
LILY_TRAIT2(is_convertible, __is_convertible)
LILY_TRAIT2(is_base_of, __is_base_of)
LILY_TRAIT2(is_assignable, __is_assignable)
#undef LILY_TRAIT2
template <typename T, typename... A>
constexpr bool is_constructible_v = __is_constructible(T, A...);
template <typename T, typename... A>
struct is_constructible : bool_constant<__is_constructible(T, A...)> {};

template <typename... B>
struct conjunction : bool_constant<(true && ... && bool(B::value))> {};
template <typename... B>
struct disjunction : bool_constant<(false || ... || bool(B::value))> {};
template <typename B>
struct negation : bool_constant<!bool(B::value)> {};
template <typename... B>
constexpr bool conjunction_v = conjunction<B...>::value;
template <typename... B>
constexpr bool disjunction_v = disjunction<B...>::value;
template <typename B>
constexpr bool negation_v = !bool(B::value);
template <typename... B>
using _conjunction = conjunction<B...>;
template <typename... B>
using _disjunction = disjunction<B...>;
template <typename B>
using _negation = negation<B>;

template <typename T>
struct make_unsigned {
  using type = __make_unsigned(T);
};
template <typename T>
struct make_signed {
  using type = __make_signed(T);
};
template <typename T>
using make_unsigned_t = typename make_unsigned<T>::type;
template <typename T>
using make_signed_t = typename make_signed<T>::type;
template <typename T>
using underlying_type_t = __underlying_type(T);
template <typename... T>
struct common_type;
template <typename T>
struct common_type<T> {
  using type = T;
};
template <typename A, typename B>
struct common_type<A, B> {
  using type = lily::common_t<A, B>;
};
template <typename A, typename B, typename... C>
struct common_type<A, B, C...> : common_type<lily::common_t<A, B>, C...> {};
template <typename... T>
using common_type_t = typename common_type<T...>::type;
template <typename T>
constexpr size_t rank_v = __array_rank(T);
template <typename T, unsigned i = 0>
constexpr size_t extent_v = __array_extent(T, i);

template <typename T>
constexpr T&& forward(__remove_reference_t(T)& x) noexcept {
  return static_cast<T&&>(x);
}
template <typename T>
constexpr __remove_reference_t(T)&& move(T&& x) noexcept {
  return static_cast<__remove_reference_t(T)&&>(x);
}
template <typename A, typename B>
constexpr void swap(A& a, B& b) {
  auto keep = a;
  a = b;
  b = keep;
}
template <typename T>
constexpr T* addressof(T& x) {
  return __builtin_addressof(x);
}

template <typename T>
struct numeric_limits {
  static constexpr bool is_specialized = false;
};
template <typename T>
  requires(bool(__is_integral(T)))
struct numeric_limits<T> {
  static constexpr bool is_specialized = true;
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr bool is_integer = true;
  static constexpr bool is_exact = true;
  static constexpr bool has_infinity = false;
  static constexpr bool has_quiet_NaN = false;
  static constexpr bool is_bounded = true;
  static constexpr bool is_iec559 = false;
  static constexpr bool is_modulo = !is_signed;
  static constexpr int max_digits10 = 0;
  static constexpr int min_exponent = 0;
  static constexpr int min_exponent10 = 0;
  static constexpr int max_exponent = 0;
  static constexpr int max_exponent10 = 0;
  static constexpr int digits = __is_same(T, bool) ? 1 : int(sizeof(T)) * 8 - (is_signed ? 1 : 0);
  static constexpr int digits10 = digits * 3 / 10;
  static constexpr int radix = 2;
  static constexpr T max() {
    return __is_same(T, bool) ? T(1) : is_signed ? T((1ul << (sizeof(T) * 8 - 1)) - 1) : T(-1);
  }
  static constexpr T min() {
    return is_signed ? T(-max() - 1) : T(0);
  }
  static constexpr T lowest() {
    return min();
  }
  static constexpr T epsilon() {
    return T(0);
  }
  static constexpr T infinity() {
    return T(0);
  }
  static constexpr T quiet_NaN() {
    return T(0);
  }
};
#define LILY_LIMITS(T, name, tiny) \
  template <> \
  struct numeric_limits<T> { \
    static constexpr bool is_specialized = true; \
    static constexpr bool is_signed = true; \
    static constexpr bool is_integer = false; \
    static constexpr bool is_exact = false; \
    static constexpr bool is_iec559 = true; \
    static constexpr bool has_infinity = true; \
    static constexpr bool has_quiet_NaN = true; \
    static constexpr bool is_bounded = true; \
    static constexpr bool is_modulo = false; \
    static constexpr int digits = name##_MANT_DIG; \
    static constexpr int digits10 = name##_DIG; \
    static constexpr int max_digits10 = name##_DECIMAL_DIG; \
    static constexpr int radix = name##_RADIX; \
    static constexpr int min_exponent = name##_MIN_EXP; \
    static constexpr int min_exponent10 = name##_MIN_10_EXP; \
    static constexpr int max_exponent = name##_MAX_EXP; \
    static constexpr int max_exponent10 = name##_MAX_10_EXP; \
    static constexpr T max() { \
      return name##_MAX; \
    } \
    static constexpr T min() { \
      return name##_MIN; \
    } \
    static constexpr T lowest() { \
      return -max(); \
    } \
    static constexpr T epsilon() { \
      return name##_EPSILON; \
    } \
    static constexpr T round_error() { \
      return T(0.5f); \
    } \
    static constexpr T infinity() { \
      return T(__builtin_huge_valf()); \
    } \
    static constexpr T quiet_NaN() { \
      return T(__builtin_nanf("")); \
    } \
    static constexpr T signaling_NaN() { \
      return T(__builtin_nanf("")); \
    } \
    static constexpr T denorm_min() { \
      return T(tiny); \
    } \
  };
LILY_LIMITS(float, FLT, 0x1p-149f)
LILY_LIMITS(half, HALF, 0x1p-24f)
LILY_LIMITS(bfloat, BFLT, 0x1p-133f)
#undef LILY_LIMITS

template <typename T, size_t N>
struct array {
  using value_type = T;
  T __elems[N];
#ifdef LILY_STRICT
  template <typename Self>
  constexpr auto& operator[](this Self& self, size_t i) {
    return self.__elems[i];
  }
  template <typename Self>
  constexpr auto* data(this Self& self) {
    return &self.__elems[0];
  }
#else
  constexpr T& operator[](size_t i) {
    lily::rt::check_index(i, N);
    return __elems[i];
  }
  constexpr const T& operator[](size_t i) const {
    lily::rt::check_index(i, N);
    return __elems[i];
  }
  constexpr T* data() {
    return __elems;
  }
  constexpr const T* data() const {
    return __elems;
  }
#endif
  constexpr T* begin() {
    return __elems;
  }
  constexpr T* end() {
    return __elems + N;
  }
  constexpr const T* begin() const {
    return __elems;
  }
  constexpr const T* end() const {
    return __elems + N;
  }
  static constexpr size_t size() {
    return N;
  }
  static constexpr bool empty() {
    return N == 0;
  }
};

// A value that is the same in every thread; only a promise to Metal's compiler.
template <typename T>
struct uniform {
  T value;
  constexpr uniform() = default;
  constexpr uniform(T v) : value(v) {}
  constexpr operator T() const {
    return value;
  }
};
template <typename T>
constexpr uniform<T> make_uniform(T v) {
  return uniform<T>(v);
}

} // namespace metal
