// Function constants and logging.
#pragma once
#pragma clang system_header

#include "base.h"

namespace lily {

// The value of [[function_constant(index)]]: specialise it before the source that declares the constant, as
// lily_mlx.launch.msl.rewrite.function_constants does.
template <int index>
struct function_constant {
  static constexpr bool defined = false;
  static constexpr int value = 0;
};
template <int index>
struct function_constant_value {
  template <typename T>
  constexpr operator T() const {
    return T(function_constant<index>::value);
  }
};

} // namespace lily

namespace metal {

enum log_type { log_type_debug, log_type_info, log_type_default, log_type_error, log_type_fault };
struct os_log {
  constexpr os_log() = default;
  template <typename A, typename B>
  constexpr os_log(A, B) {}
  template <typename... A>
  void log(A...) const {}
  template <typename... A>
  void log_debug(A...) const {}
  template <typename... A>
  void log_info(A...) const {}
  template <typename... A>
  void log_error(A...) const {}
  template <typename... A>
  void log_fault(A...) const {}
  template <typename... A>
  void log_with_type(A...) const {}
};
inline constexpr os_log os_log_default{};

} // namespace metal
