// What a kernel compiled for the host sees of the simulated GPU. No other header is needed before it.
//
// A launch runs on one OS thread: every GPU thread is a fiber, 32 of them are a simdgroup, and the fibers
// switch only inside the functions below. So plain loads and stores are atomic between GPU threads, and an
// atomic operation needs no lock.
//
// The worker process that runs kernels (worker.cpp) sets `lily_host` when it loads a kernel. Both sides include
// this file; its contents are part of a kernel's cache key, so the two cannot disagree.
//
// A function that belongs to the simulation, not to the kernel, is LILY_RT_INLINE: it has no line of its own
// in the debug information, so a fault inside it is reported at the kernel's line.
#pragma once

#define LILY_RT_INLINE inline __attribute__((always_inline, nodebug))

// Where `threadgroup` variables live: statics in one section, which the worker fills with a poison value
// before every threadgroup.
#if defined(__APPLE__)
#define LILY_RT_THREADGROUP __attribute__((section("__DATA,lily_tg"), aligned(16)))
#else
#define LILY_RT_THREADGROUP __attribute__((section("lily_tg"), aligned(16)))
#endif

// The rewriter marks the functions that may reach a collective. In the checked build each keeps a frame of its
// own, so that the frames of a stack say by which calls a lane came there.
#if defined(LILY_RT_CHECKED)
#define LILY_RT_CALLS __attribute__((noinline, nomerge))
#else
#define LILY_RT_CALLS
#endif

namespace lily::rt {

using u8 = unsigned char;
using u32 = __UINT32_TYPE__;
using u64 = __UINT64_TYPE__;
using size = __SIZE_TYPE__;

inline constexpr u32 simd_width = 32;
inline constexpr size max_exchange_bytes = 256;  // per lane

struct Vec3 {
  u32 x, y, z;
};

// Named after the MSL attributes. Indices count threads, never bytes.
struct ThreadInfo {
  Vec3 thread_position_in_grid;
  Vec3 thread_position_in_threadgroup;
  u32 thread_index_in_threadgroup;
  u32 thread_index_in_simdgroup;
  u32 simdgroup_index_in_threadgroup;
  u64 turns;  // of the loops that the thread is in: see Loop
};

// The same for every thread of a threadgroup. `threads_per_threadgroup` is smaller at the grid's edge;
// `dispatch_threads_per_threadgroup` is not.
struct GroupInfo {
  Vec3 threads_per_grid;
  Vec3 threadgroups_per_grid;
  Vec3 threadgroup_position_in_grid;
  Vec3 threads_per_threadgroup;
  Vec3 dispatch_threads_per_threadgroup;
  u32 simdgroups_per_threadgroup;
  u32 dispatch_simdgroups_per_threadgroup;
};

// The kinds of a report; lily_mlx/launch/host.py maps them to exceptions by number.
enum class Kind : u32 {
  none = 0,
  out_of_bounds = 1,
  barrier_mismatch = 2,
  divergent_simd = 3,
  inactive_lane = 4,
  index_overflow = 5,
  crash = 6,
  timeout = 7,
  uninitialized = 8,
};

// The MSL name of a simd operation, a string literal: "simd_sum". Lanes meet only at the same name and line,
// and in the checked build by the same calls.
using Op = const char*;

// Runs once per collective, in the lane that arrives last. `values` holds the deposits of the 32 lanes,
// `bytes` each as deposited, lane 0 first; entries whose bit in `active` is clear hold nothing. It turns
// them, in place, into what each lane receives.
using Combine = void (*)(void* values, u32 active);

struct Host {
  ThreadInfo* const* current;
  const GroupInfo* group;
  const void* (*collective)(Op, int line, const void* mine, size bytes, Combine, u32* active);
  void (*barrier)(int line);
  void (*returned)(int line);
  void (*fault)(Kind, int line, const char* file, const char* message);
};

// The worker's side; every kernel has the variable and the worker sets it before the first launch (entry.h).
extern "C" __attribute__((visibility("hidden"))) const Host* lily_host;

LILY_RT_INLINE const ThreadInfo& thread() { return **lily_host->current; }
LILY_RT_INLINE const GroupInfo& group() { return *lily_host->group; }
LILY_RT_INLINE u32 lane() { return thread().thread_index_in_simdgroup; }

// The rewriter puts LILY_RT_LOOP before each loop that may reach a collective, and LILY_RT_TURN before its body, so
// that lanes in different turns can be told apart: a thread's `turns` are a hash of the turn of every such loop
// that it is in, through calls too. Only in the checked build.
// Literal, for functions that are constexpr only in name: a collective is never evaluated by the compiler.
struct Loop {
  u64* mine = __builtin_is_constant_evaluated() ? nullptr : &(*lily_host->current)->turns;
  u64 outer = mine ? *mine : 0, turn = 0;
  bool entered = false;

  LILY_RT_INLINE constexpr Loop() {}
  LILY_RT_INLINE constexpr ~Loop() {
    if (mine) *mine = outer;
  }
  LILY_RT_INLINE constexpr bool enter() {
    bool first = !entered;
    entered = true;
    return first;
  }
  LILY_RT_INLINE __attribute__((no_sanitize("integer"))) constexpr bool next() {
    if (mine) *mine = (outer + ++turn) * 0x9E3779B97F4A7C15u;
    return false;
  }
};
#if defined(LILY_RT_CHECKED)
#define LILY_RT_LOOP for (::lily::rt::Loop lily_loop; lily_loop.enter();)
#define LILY_RT_TURN if (lily_loop.next()) {} else
#else
#define LILY_RT_LOOP
#define LILY_RT_TURN
#endif

// Ends the launch with a report at this line of the current thread's kernel code; 0: the line that it is in.
[[noreturn]] LILY_RT_INLINE void fault(Kind kind, int line, const char* message) {
  lily_host->fault(kind, line, nullptr, message);
  __builtin_unreachable();
}

// Ends the launch of a checked build unless index < n.
LILY_RT_INLINE constexpr void check_index([[maybe_unused]] size index, [[maybe_unused]] size n) {
#if defined(LILY_RT_CHECKED)
  if (index >= n) fault(Kind::out_of_bounds, 0, "index out of bounds");
#endif
}

// Rendezvous of the active lanes of a simdgroup: those that have not left by a `return` statement. Each
// deposits `bytes` (at most max_exchange_bytes) from `mine`; the result points to 32 entries of `bytes`,
// lane 0 first, valid until this lane's next collective but one, and `active` has a bit per lane that took
// part. Without `combine` the entries are the deposits. Lanes that meet different operations or lines end the
// launch with DivergentSimd; in a checked launch, so do lanes at a barrier or at the kernel's end.
LILY_RT_INLINE const void* simd_collective(Op op, int line, const void* mine, size bytes, Combine combine,
                                           u32* active) {
  [[clang::nomerge]] return lily_host->collective(op, line, mine, bytes, combine, active);
}

// The same, typed: what every lane deposited.
template <class T>
LILY_RT_INLINE const T* simd_gather(Op op, int line, const T& mine, u32& active) {
  static_assert(sizeof(T) <= max_exchange_bytes);
  return static_cast<const T*>(simd_collective(op, line, &mine, sizeof(T), nullptr, &active));
}

// The same, typed: `combine(values, active)` runs once over the 32 deposits; this lane's entry is returned.
template <class T>
LILY_RT_INLINE T simd_combine(Op op, int line, const T& mine, void (*combine)(T* values, u32 active)) {
  static_assert(sizeof(T) <= max_exchange_bytes);
  u32 active;
  const void* values = simd_collective(op, line, &mine, sizeof(T), reinterpret_cast<Combine>(combine), &active);
  return static_cast<const T*>(values)[lane()];
}

LILY_RT_INLINE void simdgroup_barrier(int line) {
  u32 active;
  simd_collective("simdgroup_barrier", line, nullptr, 0, nullptr, &active);
}

// Rendezvous of the threadgroup's threads that have not left by a `return` statement, all at one line.
LILY_RT_INLINE void threadgroup_barrier(int line) { [[clang::nomerge]] lily_host->barrier(line); }

// The launcher turns `return;` into LILY_RT_RETURN, so that a lane that left on purpose (inactive from then
// on, as on the GPU) can be told from one that ran past a branch which others are still in.
LILY_RT_INLINE void returned(int line) { lily_host->returned(line); }
#define LILY_RT_RETURN for (::lily::rt::returned(__builtin_LINE());;) return

}  // namespace lily::rt
