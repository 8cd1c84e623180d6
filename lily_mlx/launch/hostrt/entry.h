// Appended to every kernel's translation unit: what the worker looks up in the compiled kernel besides the
// entry point, and the handlers of the compiler's checks.
#pragma once

#include "runtime.h"

#if defined(__APPLE__)
extern "C" lily::rt::u8 lily_threadgroup_begin[] __asm("section$start$__DATA$lily_tg");
extern "C" lily::rt::u8 lily_threadgroup_end[] __asm("section$end$__DATA$lily_tg");
#else
extern "C" __attribute__((weak, visibility("hidden"))) lily::rt::u8 lily_threadgroup_begin[] __asm("__start_lily_tg");
extern "C" __attribute__((weak, visibility("hidden"))) lily::rt::u8 lily_threadgroup_end[] __asm("__stop_lily_tg");
#endif
extern "C" __attribute__((visibility("default"))) lily::rt::u8* const lily_threadgroup_range[2] = {
    lily_threadgroup_begin, lily_threadgroup_end};

// What as_metal() in compiler.py fills locals from, and a null pointer that the compiler does not see through.
extern "C" __attribute__((visibility("hidden"))) lily::rt::u8 lily_fill[];
lily::rt::u8 lily_fill[256];
extern "C" __attribute__((visibility("hidden"))) void* lily_null;
void* lily_null;
extern "C" __attribute__((visibility("default"))) lily::rt::u8* const lily_fill_range[2] = {
    lily_fill, lily_fill + sizeof lily_fill};

const lily::rt::Host* lily::rt::lily_host;
extern "C" __attribute__((visibility("default"))) void lily_bind(const lily::rt::Host* host) {
  lily::rt::lily_host = host;
}

namespace lily::rt {

// Stands for a buffer in the call of the kernel and becomes the pointer or reference its parameter is.
struct Argument {
  void* data;
  template <class T>
  operator T*() const {
    return static_cast<T*>(data);
  }
  template <class T>
  operator T&() const {
    return *static_cast<T*>(data);
  }
};

// Laid out by the compiler, as every user of -fsanitize sees them.
struct SourceLocation {
  const char* file;
  u32 line;
  u32 column;
};
struct TypeDescriptor {
  __UINT16_TYPE__ kind;  // 0: integer
  __UINT16_TYPE__ info;  // bit 0: signed; the rest: log2 of the width
  char name[1];
};
struct CheckData {
  SourceLocation location;
  const TypeDescriptor* type;
};

LILY_RT_INLINE void check_failed(const CheckData& data, Kind kind, const char* message) {
  lily_host->fault(kind, static_cast<int>(data.location.line), data.location.file, message);
}

// An unsigned product that wraps is an index that left 32 bits when both factors are sizes or positions; a hash
// when one is large; and a random number when one is the multiplier of a linear congruential generator, which
// is 1 modulo 4 for its full period.
LILY_RT_INLINE bool is_index_factor(u64 x) { return x < 1 << 24 && (x < 1 << 16 || x % 4 != 1); }

}  // namespace lily::rt

#define LILY_CHECK extern "C" __attribute__((weak, visibility("hidden"), nodebug)) void

LILY_CHECK __ubsan_handle_add_overflow(lily::rt::CheckData* data, lily::rt::size, lily::rt::size) {
  if (data->type->info & 1)
    lily::rt::check_failed(*data, lily::rt::Kind::index_overflow, "signed addition overflows");
}
LILY_CHECK __ubsan_handle_sub_overflow(lily::rt::CheckData* data, lily::rt::size, lily::rt::size) {
  if (data->type->info & 1)
    lily::rt::check_failed(*data, lily::rt::Kind::index_overflow, "signed subtraction overflows");
}
LILY_CHECK __ubsan_handle_mul_overflow(lily::rt::CheckData* data, lily::rt::size a, lily::rt::size b) {
  if (data->type->info & 1)
    lily::rt::check_failed(*data, lily::rt::Kind::index_overflow, "signed product overflows");
  else if (data->type->info >> 1 == 5 && lily::rt::is_index_factor(a) && lily::rt::is_index_factor(b))
    lily::rt::check_failed(*data, lily::rt::Kind::index_overflow, "unsigned 32-bit product of two indices wraps");
}
LILY_CHECK __ubsan_handle_negate_overflow(lily::rt::CheckData* data, lily::rt::size) {
  if (data->type->info & 1)
    lily::rt::check_failed(*data, lily::rt::Kind::index_overflow, "negation overflows");
}
LILY_CHECK __ubsan_handle_divrem_overflow(lily::rt::CheckData* data, lily::rt::size, lily::rt::size) {
  lily::rt::check_failed(*data, lily::rt::Kind::crash, "integer division by zero, or it overflows");
}
LILY_CHECK __ubsan_handle_out_of_bounds(lily::rt::CheckData* data, lily::rt::size) {
  lily::rt::check_failed(*data, lily::rt::Kind::out_of_bounds, "array index out of bounds");
}
LILY_CHECK __ubsan_handle_load_invalid_value(lily::rt::CheckData* data, lily::rt::size) {
  lily::rt::check_failed(*data, lily::rt::Kind::uninitialized, "read of a bool that was never written");
}
