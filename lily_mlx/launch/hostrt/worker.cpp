// The worker process: it loads compiled kernels and runs a launch as fibers on one OS thread.
//
// Why a process: a kernel may write anywhere, and only another address space keeps the interpreter whole.
// The parent (lily_mlx/launch/host.py) shares one file, the arena: a control page with a request and a
// report, then the buffers of the launch. Each buffer is mapped alone in a slot of address space that is
// far larger than any 32-bit index can leave, so that a fault's address names the buffer.
//
// A GPU thread is a fiber with a stack of its own. Fibers switch directly to one another, and only in
// collective(), barrier() and at the kernel's end. A fault found by the scheduler drops all fibers and
// returns to the loop; a signal writes the report and ends the process, for its memory may be damaged.
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#if defined(__APPLE__)
#include <sys/ucontext.h>
#else
#include <ucontext.h>
#endif
#include <unistd.h>

#include "runtime.h"

using namespace lily::rt;
using i64 = __INT64_TYPE__;

namespace {

constexpr u32 max_buffers = 128;
constexpr u32 max_threads = 1024;
constexpr u32 max_groups = max_threads / simd_width;
constexpr size fiber_stack_bytes = 256 << 10;
constexpr size stale_bytes = 256;  // of a stack, poisoned before each thread of a checked launch

// ---------------------------------------------------------------------------------------------- protocol
// Laid out as host.py packs them.

struct Buffer {
  u64 file_offset;  // of the mapping in the arena, a multiple of the page size
  u64 map_bytes;    // a multiple of the page size, may be 0
  u64 data_offset;  // of the data in the mapping
  u64 data_bytes;
  u32 writable;
  int poison;  // the byte that the data holds which nothing wrote; -1: it has values
};

struct Request {
  u32 command;
  u32 kernel;
  Vec3 grid;          // threads
  Vec3 threadgroup;   // threads
  u32 schedule;       // 0 fifo, 1 lifo, 2 random
  __UINT16_TYPE__ poison;  // the byte that threadgroup memory and locals hold which nothing wrote
  __UINT16_TYPE__ wraps;   // an overflow is no fault: it comes from the poison
  u64 seed;
  u32 time_limit_ms;
  u32 buffer_count;
  u32 check;  // the checked build: see collective(), barrier() and leave()
  char path[1024];
  Buffer buffers[max_buffers];
};

struct Report {
  u32 kind;
  int line;
  u32 has_thread;
  Vec3 thread_position_in_grid;
  Vec3 threadgroup_position_in_grid;
  int buffer;        // -1: no buffer
  i64 offset_bytes;  // of the access, from the buffer's first byte
  u32 access;        // 0 unknown, 1 read, 2 write
  u32 misaligned;    // a vector access that the CPU, not the kernel, finds misaligned
  u32 kernel;        // the id of a loaded kernel
  u32 threadgroup_bytes;
  char file[512];
  char message[512];
};

enum Command : u32 { load = 1, run = 2 };
constexpr size report_offset = 0, request_offset = 4096, control_bytes = 65536;
static_assert(sizeof(Report) <= request_offset && request_offset + sizeof(Request) <= control_bytes);

// ----------------------------------------------------------------------------------------------- kernels

// Both tables are made by add_tables() in compiler.py.
struct LineEntry {
  int code;         // address of the instruction, relative to this field
  u32 file;
  u32 line;
  u32 column;        // 0: the compiler gave this code no line, that of the code before is a guess
};

struct ArrayEntry {  // a threadgroup variable
  int data;          // relative to this field
  u32 bytes;

  u8* begin() const { return reinterpret_cast<u8*>(const_cast<int*>(&data)) + data; }
};

constexpr size red_zone_bytes = 64;  // before the first threadgroup variable and behind each

struct Kernel {
  void (*entry)(void* const* buffers);
  u8* threadgroup_begin;
  u8* threadgroup_end;
  u8* fill_begin;  // what locals that nothing wrote are copied from
  u8* fill_end;
  const LineEntry* lines;
  const LineEntry* lines_end;
  const char* files;  // zero-terminated names, in the order of LineEntry::file
  const ArrayEntry* arrays;
  const ArrayEntry* arrays_end;
  const char* array_names;  // as files
  const char* code_begin;
  const char* code_end;
};

struct Location {  // file is "" and line 0 where nothing is known
  const char* file;
  int line;
  int column;
};
constexpr Location nowhere = {"", 0, 0};

const char* nth_name(const char* names, size n) {
  while (n--) names += strlen(names) + 1;
  return names;
}

// The table's last entry at or before pc. Functions of the simulation start with an entry of line 0, what follows
// a function has line 0 and column 1, and the function that calls the kernel is a file of its own, "entry".
Location locate(const Kernel& kernel, const char* pc) {
  const char* best = nullptr;
  const LineEntry* found = nullptr;
  if (pc >= kernel.code_begin && pc < kernel.code_end)
    for (const LineEntry* e = kernel.lines; e < kernel.lines_end; ++e) {
      const char* code = reinterpret_cast<const char*>(&e->code) + e->code;
      if (code <= pc && code >= best) best = code, found = e;
    }
  if (!found || !found->line) return {"", 0, found ? static_cast<int>(found->column) : 0};
  const char* file = nth_name(kernel.files, found->file);
  if (!strcmp(file, "entry")) return nowhere;
  return {file, static_cast<int>(found->line), static_cast<int>(found->column)};
}

// ------------------------------------------------------------------------------------------------ fibers

// Saves the callee-saved registers on the stack, stores the stack pointer to *save and continues at `to`.
extern "C" void lily_switch(void** save, void* to);

#if defined(__APPLE__)
#define LILY_SYMBOL(name) "_" name
#else
#define LILY_SYMBOL(name) name
#endif

#if defined(__x86_64__)
asm(".text\n.p2align 4\n.globl " LILY_SYMBOL("lily_switch") "\n" LILY_SYMBOL("lily_switch") ":\n"
    "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
    "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
    // Fibers mostly switch at the same place of the kernel, so a return is predicted as if there were one.
    "ret\n");
constexpr size saved_words = 6;
#elif defined(__aarch64__)
asm(".text\n.p2align 4\n.globl " LILY_SYMBOL("lily_switch") "\n" LILY_SYMBOL("lily_switch") ":\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp, #0]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n"
    "stp x25, x26, [sp, #48]\n stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
    "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
    "ldp x19, x20, [sp, #0]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n"
    "ldp x25, x26, [sp, #48]\n ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\n ret\n");
#else
#error "the host back-end knows x86-64 and arm64"
#endif

constexpr u32 max_calls = 16;

struct Fiber {
  void* sp;
  ThreadInfo info;
  const char* calls[max_calls];  // the return addresses that led to its last collective, innermost first
  u32 call_count;
  bool returned;  // its last act was a `return` statement
  bool started;   // the stack holds a suspended kernel_loop()
};

// A set of lanes is a mask of 32 bits, lane 0 lowest.
struct SimdGroup {
  u32 live;       // lanes still in the kernel
  u32 ready;      // lanes that could run now
  u32 waiting;    // lanes at the pending collective
  u32 at_barrier; // lanes at the threadgroup barrier
  u32 ended;      // lanes that ran to the kernel's end, without a `return`
  u32 active;     // lanes that took part in the last collective
  Op op;          // the pending collective
  int line;
  size bytes;
  u32 phase;      // which of the two tables the pending collective fills
  u32 place;      // in the order in which simdgroups run
  u32 rotation;   // lanes run in the order rotation, rotation + 1, ... or, descending, the reverse
  bool descending;
  // Two, for a lane may deposit for its next collective while others still read from the last.
  alignas(64) u8 tables[2][simd_width * max_exchange_bytes];
};

u8* control;
Report* report;
Request* request;
int arena_fd, reply_fd;
pid_t parent;

Kernel* kernels;
u32 kernel_count;

Fiber fibers[max_threads];
SimdGroup groups[max_groups];
char* stacks;
size stack_guard_bytes;
void* main_sp;

const Kernel* kernel;  // of the launch in progress
ThreadInfo* current;
GroupInfo group_info;
void* arguments[max_buffers];
volatile sig_atomic_t running;
bool failed;
u64 deadline_ns;
u32 looks;  // for the line of a kernel whose time is up

u32 live_threads, waiting_threads, ended_threads, first_ended;
int barrier_line;
u32 barrier_thread;  // the first to arrive
u32 group_order[max_groups];
u32 ready_places;  // which places of group_order have a lane that could run
u64 random_state;

u64 next_random() {  // splitmix64
  u64 z = (random_state += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

u32 thread_index() { return current->thread_index_in_threadgroup; }

// ------------------------------------------------------------------------------------------------ report

void copy_text(char* to, size room, const char* from) {
  size n = 0;
  for (; from && from[n] && n + 1 < room; ++n) to[n] = from[n];
  to[n] = 0;
}

void report_thread() {
  report->has_thread = 1;
  report->thread_position_in_grid = current->thread_position_in_grid;
  report->threadgroup_position_in_grid = group_info.threadgroup_position_in_grid;
}

// Whether the instruction before an address of the kernel's code is a call, so that it may be a return address:
// a pointer to a function follows the last instruction of the function before.
bool follows_call(const char* at) {
  if (at < kernel->code_begin + 7 || at >= kernel->code_end) return false;
  auto code = reinterpret_cast<const u8*>(at);
#if defined(__aarch64__)
  u32 instruction;
  memcpy(&instruction, code - 4, sizeof instruction);
  return instruction >> 26 == 0x25 || (instruction & 0xFFFFFC1F) == 0xD63F0000;  // bl, blr
#else
  if (code[-5] == 0xE8) return true;
  for (int bytes = 2; bytes <= 7; ++bytes)  // call *register, or *memory with no, a short or a long offset
    if (code[-bytes] == 0xFF && (code[1 - bytes] >> 3 & 7) == 2) return true;
  return false;
#endif
}

// Where in the kernel's source a fiber is whose stack is in use from sp on: the innermost word that could be
// a return address into the kernel, and with `line` given, the innermost on that line.
Location locate_on_stack(u32 fiber, const void* sp, int line) {
  const char* top = stacks + (fiber + 1) * fiber_stack_bytes;
  const char* at = static_cast<const char*>(sp);
  Location first = nowhere;
  if (at < top - fiber_stack_bytes) return first;
  for (; at + sizeof(void*) <= top; at += sizeof(void*)) {
    const char* word;
    memcpy(&word, at, sizeof word);
    if (!follows_call(word)) continue;
    Location location = locate(*kernel, word - 1);
    if (location.line && (!line || location.line == line)) return location;
    if (location.line && !first.line) first = location;
  }
  return first;
}

// Notes by which calls the current thread came to a collective whose stack frame is given. Only the checked
// build keeps a frame per function.
void note_calls(Fiber& fiber, const void* frame) {
  u32 n = 0;
  for (auto at = static_cast<const void* const*>(frame); at && n < max_calls; at = static_cast<const void* const*>(*at))
    fiber.calls[n++] = static_cast<const char*>(at[1]);
  fiber.call_count = n;
}

// The calls' places in the source, innermost first; those of the simulation have none. Returns their number.
u32 locate_calls(const Fiber& fiber, Location* places) {
  u32 n = 0;
  for (u32 i = 0; i < fiber.call_count; ++i) {
    Location place = locate(*kernel, fiber.calls[i] - 1);
    if (place.line) places[n++] = place;
  }
  return n;
}

u64 known_same[256];  // keys of pairs of call chains that are the same calls, by their lowest bits

// Whether two threads came to a collective by the same calls in the source. The compiler may have made several
// copies of the code around a call, so different addresses say nothing yet. `differs` are the calls that do.
bool same_calls(const Fiber& a, const Fiber& b, Location differs[2]) {
  if (a.call_count == b.call_count && !memcmp(a.calls, b.calls, a.call_count * sizeof *a.calls)) return true;
  u64 key = 0;
  const Fiber* both[] = {&a, &b};
  for (const Fiber* fiber : both)
    for (u32 i = 0; i < fiber->call_count; ++i)
      key = (key ^ reinterpret_cast<u64>(fiber->calls[i])) * 0x9E3779B97F4A7C15u, key ^= key >> 29;
  if (known_same[key % 256] == key) return true;
  Location from[2][max_calls];
  u32 n = locate_calls(a, from[0]), m = locate_calls(b, from[1]);
  for (u32 i = 0; i < n && i < m; ++i) {
    const Location &x = from[0][i], &y = from[1][i];
    bool guess = !x.column || !y.column;
    if (guess || (x.line == y.line && x.column == y.column && !strcmp(x.file, y.file))) continue;
    differs[0] = x, differs[1] = y;
    return false;
  }
  known_same[key % 256] = key;
  return true;
}

// Ends the launch: the report is filled in, every fiber is dropped where it stands.
[[noreturn]] void end_launch(Kind kind, int line, const char* file) {
  report->kind = static_cast<u32>(kind);
  report->line = line;
  report->buffer = -1;
  copy_text(report->file, sizeof report->file, file);
  report_thread();
  failed = true;
  void* dropped;
  lily_switch(&dropped, main_sp);
  __builtin_unreachable();
}

// A fault of the current thread, or of the one that waits with index `waiting`.
[[noreturn]] __attribute__((format(printf, 4, 5))) void fail(Kind kind, int line, int waiting, const char* format,
                                                              ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(report->message, sizeof report->message, format, values);
  va_end(values);
  const void* sp = waiting < 0 ? __builtin_frame_address(0) : fibers[waiting].sp;
  if (waiting >= 0) current = &fibers[waiting].info;
  end_launch(kind, line, locate_on_stack(thread_index(), sp, line).file);
}

// A fault of the current thread and another one, which came to the collective `op` by calls that differ at the
// places `from`.
[[noreturn]] void fail_call(Kind kind, const Location from[2], const char* format, Op op, int line, u32 mine,
                            u32 other) {
  char where[64] = "at another place of this line", what[256];
  if (from[0].line != from[1].line) snprintf(where, sizeof where, "in line %d", from[1].line);
  snprintf(what, sizeof what, format, op, line, mine, other);
  snprintf(report->message, sizeof report->message, "%s %s", what, where);
  end_launch(kind, from[0].line, from[0].file);
}

// --------------------------------------------------------------------------------------------- scheduler

u32 first_lane(const SimdGroup& g, u32 lanes) {
  u32 rotated = __builtin_rotateright32(lanes, g.rotation);
  u32 bit = g.descending ? 31 - __builtin_clz(rotated) : __builtin_ctz(rotated);
  return (bit + g.rotation) % simd_width;
}

void set_ready(SimdGroup& g, u32 lanes) {
  g.ready = lanes;
  if (lanes) ready_places |= 1u << g.place;
}

// Reports the current thread if a red zone was written since it got the CPU; `line` is where it gives it up.
void check_red_zones(int line) {
  for (const ArrayEntry* a = kernel->arrays; a < kernel->arrays_end; ++a) {
    auto written = [](const u8* zone) {
      for (size i = 0; i < red_zone_bytes; ++i)
        if (zone[i] != request->poison) return true;
      return false;
    };
    bool before = a == kernel->arrays && written(a->begin() - red_zone_bytes);
    if (before || written(a->begin() + a->bytes)) {
      const char* name = nth_name(kernel->array_names, static_cast<size>(a - kernel->arrays));
      fail(Kind::out_of_bounds, line, -1, "write %s threadgroup variable '%s', before this line",
           before ? "before the start of" : "behind the end of", name);
    }
  }
}

// Gives the CPU to the next lane that can run: of this simdgroup while it has one, else of the first
// simdgroup in order. With none left the threadgroup is done.
void run_next(SimdGroup& mine, void** save) {
  SimdGroup* g = &mine;
  if (!g->ready) {
    ready_places &= ~(1u << g->place);
    if (!ready_places) {
      lily_switch(save, main_sp);
      return;
    }
    g = &groups[group_order[__builtin_ctz(ready_places)]];
  }
  u32 lane = first_lane(*g, g->ready);
  g->ready &= ~(1u << lane);
  Fiber& next = fibers[static_cast<u32>(g - groups) * simd_width + lane];
  current = &next.info;
  if (save != &next.sp) lily_switch(save, next.sp);
}

// The order in which simdgroups, and lanes within them, run until the next threadgroup barrier. Simdgroups
// keep the CPU as long as they can: that separates their progress most, which is what shows races.
void draw_order() {
  u32 n = group_info.simdgroups_per_threadgroup;
  for (u32 i = 0; i < n; ++i) {
    group_order[i] = request->schedule == 1 ? n - 1 - i : i;
    groups[i].descending = request->schedule == 1;
    groups[i].rotation = 0;
  }
  if (request->schedule == 2) {
    for (u32 i = n - 1; i > 0; --i) {
      u32 j = next_random() % (i + 1), kept = group_order[i];
      group_order[i] = group_order[j];
      group_order[j] = kept;
    }
    for (u32 i = 0; i < n; ++i) {
      u64 r = next_random();
      groups[i].descending = r & 1;
      groups[i].rotation = (r >> 1) % simd_width;
    }
  }
  for (u32 i = 0; i < n; ++i) groups[group_order[i]].place = i;
}

void complete_collective(SimdGroup& g, Combine combine) {
  u8* table = g.tables[g.phase];
  if (g.waiting != ~0u)
    for (u32 lane = 0; lane < simd_width; ++lane)
      if (!(g.waiting >> lane & 1)) memset(table + lane * g.bytes, 0xFF, g.bytes);
  if (combine) combine(table, g.waiting);
  g.active = g.waiting;
  g.phase ^= 1;
  g.waiting = 0;
  set_ready(g, g.active);
}

// Lets every simdgroup go on and returns the first in order: not the last to arrive, which would run ahead of
// the others at every barrier, whatever the schedule.
SimdGroup& release_barrier() {
  waiting_threads = 0;
  ready_places = 0;
  draw_order();
  for (u32 i = 0; i < group_info.simdgroups_per_threadgroup; ++i) {
    groups[i].at_barrier = 0;
    set_ready(groups[i], groups[i].live);
  }
  return groups[group_order[0]];
}

// Of each simdgroup's pending collective, for a lane that completes it by leaving or, unchecked, at a barrier.
Combine pending_combine[max_groups];

// Whether no more lanes can come to the pending collective. Those at a barrier do not; a checked launch ends
// before one waits there while others are at a collective.
bool is_complete(const SimdGroup& g) { return g.waiting && g.waiting == (g.live & ~g.at_barrier); }

const void* collective(Op op, int line, const void* mine, size bytes, Combine combine, u32* active) {
  u32 index = thread_index(), lane = index % simd_width;
  SimdGroup& g = groups[index / simd_width];
  fibers[index].returned = false;
  if (request->check) {
    check_red_zones(line);
    note_calls(fibers[index], __builtin_frame_address(0));
  }
  if (!g.waiting) {
    if (request->check && g.ended)
      fail(Kind::divergent_simd, line, -1, "%s in divergent code: lane %u waits, lane %d ran to the kernel's end",
           op, lane, __builtin_ctz(g.ended));
    if (request->check && g.at_barrier)
      fail(Kind::divergent_simd, line, -1, "%s in divergent code: lane %d waits at threadgroup_barrier, line %d", op,
           __builtin_ctz(g.at_barrier), barrier_line);
    g.op = op, g.line = line, g.bytes = bytes;
    pending_combine[index / simd_width] = combine;
  } else if (line != g.line || (op != g.op && strcmp(op, g.op) != 0) || bytes != g.bytes) {
    fail(Kind::divergent_simd, line, -1, "%s in divergent code: lane %d waits at %s, line %d", op,
         __builtin_ctz(g.waiting), g.op, g.line);
  } else if (request->check) {
    u32 first = __builtin_ctz(g.waiting);
    Location from[2];
    if (!same_calls(fibers[index], fibers[index - lane + first], from))
      fail_call(Kind::divergent_simd, from, "%s of line %d in divergent code: lane %u calls it here, lane %u", op, line,
                lane, first);
    if (fibers[index].info.turns != fibers[index - lane + first].info.turns)
      fail(Kind::divergent_simd, line, -1, "%s in divergent code: lane %u is in another turn of a loop than lane %u", op,
           lane, first);
  }
  u8* table = g.tables[g.phase];
  switch (bytes) {  // constant sizes become single moves
    case 0: break;
    case 2: memcpy(table + lane * 2, mine, 2); break;
    case 4: memcpy(table + lane * 4, mine, 4); break;
    case 8: memcpy(table + lane * 8, mine, 8); break;
    default: memcpy(table + lane * bytes, mine, bytes);
  }
  g.waiting |= 1u << lane;
  if (is_complete(g)) complete_collective(g, combine);
  run_next(g, &fibers[index].sp);
  *active = g.active;
  return table;
}

void barrier(int line) {
  u32 index = thread_index(), lane = index % simd_width;
  SimdGroup& g = groups[index / simd_width];
  fibers[index].returned = false;
  if (request->check) {
    check_red_zones(line);
    note_calls(fibers[index], __builtin_frame_address(0));
  }
  if (request->check && g.waiting)
    fail(Kind::divergent_simd, line, -1, "threadgroup_barrier in divergent code: lane %d waits at %s, line %d",
         __builtin_ctz(g.waiting), g.op, g.line);
  if (request->check && ended_threads)
    fail(Kind::barrier_mismatch, line, -1, "thread %u of the threadgroup waits, thread %u ran to the kernel's end",
         index, first_ended);
  if (waiting_threads && line != barrier_line)
    fail(Kind::barrier_mismatch, line, -1, "thread %u of the threadgroup is at this barrier, thread %u at line %d",
         index, barrier_thread, barrier_line);
  Location from[2];
  if (request->check && waiting_threads && !same_calls(fibers[index], fibers[barrier_thread], from))
    fail_call(Kind::barrier_mismatch, from, "%s of line %d: thread %u of the threadgroup calls it here, thread %u",
              "threadgroup_barrier", line, index, barrier_thread);
  if (request->check && waiting_threads && fibers[index].info.turns != fibers[barrier_thread].info.turns)
    fail(Kind::barrier_mismatch, line, -1, "thread %u of the threadgroup is in another turn of a loop than thread %u",
         index, barrier_thread);
  if (!waiting_threads++) barrier_line = line, barrier_thread = index;
  g.at_barrier |= 1u << lane;
  if (is_complete(g)) complete_collective(g, pending_combine[index / simd_width]);
  run_next(waiting_threads == live_threads ? release_barrier() : g, &fibers[index].sp);
}

void returned(int) { fibers[thread_index()].returned = true; }

void fault(Kind kind, int line, const char* file, const char* message) {
  if (kind == Kind::index_overflow && request->wraps) return;
  copy_text(report->message, sizeof report->message, message);
  // The headers of the language have no lines of their own.
  if (file && strstr(file, "/msl/include/lily/")) file = nullptr, line = 0;
  if (!file) {
    Location location = locate_on_stack(thread_index(), __builtin_frame_address(0), line);
    if (!line) line = location.line;
    file = location.file;
  }
  end_launch(kind, line, file);
}

const Host host = {&current, &group_info, collective, barrier, returned, fault};

// The end of a GPU thread. Others may be waiting for it.
void leave(Fiber& fiber) {
  u32 index = static_cast<u32>(&fiber - fibers), lane = index % simd_width;
  SimdGroup& g = groups[index / simd_width];
  if (request->check) check_red_zones(0);
  g.live &= ~(1u << lane);
  --live_threads;
  if (request->check && !fiber.returned) {
    if (g.waiting)
      fail(Kind::divergent_simd, g.line, static_cast<int>(index - lane) + __builtin_ctz(g.waiting),
           "%s in divergent code: lane %d waits, lane %u ran to the kernel's end", g.op, __builtin_ctz(g.waiting), lane);
    if (waiting_threads)
      fail(Kind::barrier_mismatch, barrier_line, static_cast<int>(barrier_thread),
           "thread %u of the threadgroup waits, thread %u ran to the kernel's end", barrier_thread, index);
    g.ended |= 1u << lane;
    if (!ended_threads++) first_ended = index;
  } else if (is_complete(g)) {
    complete_collective(g, pending_combine[index / simd_width]);
  }
  run_next(waiting_threads && waiting_threads == live_threads ? release_barrier() : g, &fiber.sp);
}

void kernel_loop() {
  Fiber& fiber = fibers[thread_index()];
  for (;;) {  // one turn per threadgroup
    kernel->entry(arguments);
    leave(fiber);
  }
}

// The stacks' tops are staggered: at equal page offsets they would all compete for the same cache lines.
void start_fiber(u32 index) {
  char* low = stacks + index * fiber_stack_bytes;
  char* top = low + fiber_stack_bytes - (index % simd_width) * 128;
  void** sp = reinterpret_cast<void**>(top);
#if defined(__x86_64__)
  *--sp = nullptr;  // as if called: the stack is 8 bytes off a multiple of 16
  *--sp = reinterpret_cast<void*>(kernel_loop);
  sp -= saved_words;
  memset(sp, 0, saved_words * sizeof *sp);
#else
  sp -= 20;
  memset(sp, 0, 160);
  sp[11] = reinterpret_cast<void*>(kernel_loop);
#endif
  fibers[index].sp = sp;
  fibers[index].started = true;
}

void drop_fibers() {
  for (Fiber& fiber : fibers) fiber.started = false;
}

void run_threadgroup(Vec3 position) {
  Vec3 grid = request->grid, full = group_info.dispatch_threads_per_threadgroup;
  Vec3 origin = {position.x * full.x, position.y * full.y, position.z * full.z};
  auto edge = [](u32 n, u32 start, u32 extent) { return n - start < extent ? n - start : extent; };
  Vec3 extent = {edge(grid.x, origin.x, full.x), edge(grid.y, origin.y, full.y), edge(grid.z, origin.z, full.z)};
  u32 threads = extent.x * extent.y * extent.z;
  group_info.threadgroup_position_in_grid = position;
  group_info.threads_per_threadgroup = extent;
  group_info.simdgroups_per_threadgroup = (threads + simd_width - 1) / simd_width;

  u32 index = 0;
  int poison = request->poison;
  for (u32 z = 0; z < extent.z; ++z)
    for (u32 y = 0; y < extent.y; ++y)
      for (u32 x = 0; x < extent.x; ++x, ++index) {
        Fiber& fiber = fibers[index];
        fiber.info = {{origin.x + x, origin.y + y, origin.z + z}, {x, y, z}, index, index % simd_width,
                      index / simd_width, 0};
        fiber.returned = false;
        if (!fiber.started) start_fiber(index);
        // What an earlier thread left on the stack is as unknown as any memory.
        if (request->check) memset(static_cast<char*>(fiber.sp) - stale_bytes, poison, stale_bytes);
      }

  live_threads = threads;
  waiting_threads = ended_threads = 0;
  ready_places = 0;
  draw_order();
  for (u32 i = 0; i < group_info.simdgroups_per_threadgroup; ++i) {
    SimdGroup& g = groups[i];
    u32 lanes = threads - i * simd_width;
    g.live = lanes >= simd_width ? ~0u : (1u << lanes) - 1;
    g.waiting = g.at_barrier = g.ended = 0;
    set_ready(g, g.live);
  }
  memset(kernel->threadgroup_begin, poison, kernel->threadgroup_end - kernel->threadgroup_begin);
  run_next(groups[group_order[0]], &main_sp);
}

u64 gcd(u64 a, u64 b) { return b ? gcd(b, a % b) : a; }

void run_grid() {
  Vec3 grid = request->grid, full = request->threadgroup;
  auto count = [](u32 n, u32 extent) { return (n + extent - 1) / extent; };
  Vec3 n = {count(grid.x, full.x), count(grid.y, full.y), count(grid.z, full.z)};
  group_info.threads_per_grid = grid;
  group_info.threadgroups_per_grid = n;
  group_info.dispatch_threads_per_threadgroup = full;
  group_info.dispatch_simdgroups_per_threadgroup = count(full.x * full.y * full.z, simd_width);
  random_state = request->seed;

  // Threadgroups run in an order of their own: start + factor * i mod total visits each once.
  u64 total = u64(n.x) * n.y * n.z, factor = 1, start = 0;
  if (request->schedule == 1) factor = start = total - 1;
  if (request->schedule == 2 && total > 1) {
    do factor = next_random() % total;
    while (gcd(factor, total) != 1);
    start = next_random() % total;
  }
  for (u64 i = 0, g = start; i < total && !failed; ++i, g = (g + factor) % total)
    run_threadgroup({u32(g % n.x), u32(g / n.x % n.y), u32(g / n.x / n.y)});
}

// ---------------------------------------------------------------------------------------------- mappings

char* slots;
size slot_bytes;
Buffer mapped[max_buffers];

// An unused range of addresses; nothing in it can be touched until map_buffers() maps a buffer there.
bool reserve(size bytes_per_slot) {
  slot_bytes = bytes_per_slot;
  void* at = mmap(nullptr, slot_bytes * max_buffers, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  slots = static_cast<char*>(at);
  return at != MAP_FAILED;
}

char* slot_middle(u32 i) { return slots + i * slot_bytes + slot_bytes / 2; }

bool map_buffers() {
  for (u32 i = 0; i < max_buffers; ++i) {
    Buffer want = i < request->buffer_count ? request->buffers[i] : Buffer{};
    Buffer& have = mapped[i];
    if (want.map_bytes != have.map_bytes || want.file_offset != have.file_offset || want.writable != have.writable) {
      if (have.map_bytes)
        mmap(slot_middle(i), have.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE | MAP_FIXED, -1, 0);
      have.map_bytes = 0;
      if (want.map_bytes) {
        if (want.map_bytes > slot_bytes / 2) return false;
        void* at = mmap(slot_middle(i), want.map_bytes, want.writable ? PROT_READ | PROT_WRITE : PROT_READ,
                        MAP_SHARED | MAP_FIXED, arena_fd, static_cast<off_t>(want.file_offset));
        if (at == MAP_FAILED) return false;
      }
    }
    have = want;
    arguments[i] = slot_middle(i) + want.data_offset;
    if (want.writable && want.poison >= 0) memset(arguments[i], want.poison, want.data_bytes);
  }
  return true;
}

// ----------------------------------------------------------------------------------------------- signals

u64 now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return u64(t.tv_sec) * 1000000000u + u64(t.tv_nsec);
}

struct Registers {
  const char* pc;
  const char* sp;
  const char* fp;
  u32 access;  // as Report::access
};

Registers registers(void* context) {
  auto* c = static_cast<ucontext_t*>(context);
#if defined(__APPLE__) && defined(__aarch64__)
  u64 syndrome = c->uc_mcontext->__es.__esr;
  return {(const char*)c->uc_mcontext->__ss.__pc, (const char*)c->uc_mcontext->__ss.__sp,
          (const char*)c->uc_mcontext->__ss.__fp,
          syndrome >> 6 & 1 ? 2u : 1u};
#elif defined(__APPLE__)
  return {(const char*)c->uc_mcontext->__ss.__rip, (const char*)c->uc_mcontext->__ss.__rsp,
          (const char*)c->uc_mcontext->__ss.__rbp,
          c->uc_mcontext->__es.__err & 2 ? 2u : 1u};
#elif defined(__x86_64__)
  return {(const char*)c->uc_mcontext.gregs[REG_RIP], (const char*)c->uc_mcontext.gregs[REG_RSP],
          (const char*)c->uc_mcontext.gregs[REG_RBP],
          c->uc_mcontext.gregs[REG_ERR] & 2 ? 2u : 1u};
#else
  // The syndrome register is one of the tagged records behind the general registers.
  constexpr u32 esr_magic = 0x45535201;
  u32 access = 0;
  const u8* record = reinterpret_cast<const u8*>(c->uc_mcontext.__reserved);
  for (;;) {
    u32 head[2];
    memcpy(head, record, sizeof head);
    if (!head[0] || !head[1]) break;
    if (head[0] == esr_magic) {
      u64 syndrome;
      memcpy(&syndrome, record + sizeof head, sizeof syndrome);
      access = syndrome >> 6 & 1 ? 2 : 1;
    }
    record += head[1];
  }
  return {(const char*)c->uc_mcontext.pc, (const char*)c->uc_mcontext.sp, (const char*)c->uc_mcontext.regs[29],
          access};
#endif
}

void reply(char status) {
  while (write(reply_fd, &status, 1) < 0 && errno == EINTR) {
  }
}

// The thread whose stack is in use, or -1 between threads.
int thread_on(const Registers& r) {
  if (r.sp < stacks || r.sp >= stacks + max_threads * fiber_stack_bytes) return -1;
  return static_cast<int>((r.sp - stacks) / fiber_stack_bytes);
}

const void* image(const void* code) {
  Dl_info info;
  return dladdr(code, &info) ? info.dli_fbase : nullptr;
}

// The kernel's line that was executing: that of the program counter or, in a function of the simulation or of a
// library, of its caller in the kernel. Libraries may keep no frames, so their stack is searched.
Location locate_fault(const Registers& r) {
  Location location = locate(*kernel, r.pc);
  int thread = thread_on(r);
  if (location.line || thread < 0) return location;
  const void* in = image(r.pc);
  bool stub = location.column;  // a jump to a library's function, which has no frame
  bool library = in != image(reinterpret_cast<void*>(kernel->entry)) && in != image(reinterpret_cast<void*>(reply));
  if (stub || library)
    return locate_on_stack(static_cast<u32>(thread), r.sp, 0);
  const char* top = stacks + (thread + 1) * fiber_stack_bytes;
  for (const char* at = r.fp; at >= r.sp && at + 2 * sizeof(void*) <= top && !location.line;) {
    auto frame = reinterpret_cast<const char* const*>(at);
    location = locate(*kernel, frame[1] - 1);
    at = frame[0];
  }
  return location;
}

void on_fault(int number, siginfo_t* info, void* context) {
  Registers r = registers(context);
  const char* address = static_cast<const char*>(info->si_addr);
  report->buffer = -1;
  report->kind = static_cast<u32>(Kind::crash);
  report->line = 0;
  report->file[0] = 0;
  report->has_thread = 0;
  const char* what = number == SIGFPE ? "integer division by zero" : number == SIGILL ? "illegal instruction" : "";
  if (number == SIGABRT) what = "abort";
  bool harmless = false;
  if (running) {
    if (thread_on(r) >= 0) current = &fibers[thread_on(r)].info;
    report_thread();
    Location location = locate_fault(r);
    report->line = location.line;
    copy_text(report->file, sizeof report->file, location.file);
    if (request->check && (number == SIGILL || number == SIGTRAP) && location.line) {
      report->kind = static_cast<u32>(Kind::out_of_bounds);
      what = "array index out of bounds";
      harmless = true;
    }
    if (number == SIGALRM) {
      report->kind = static_cast<u32>(Kind::timeout);
      what = "the time limit passed";
    }
    if (number == SIGSEGV || number == SIGBUS) {
      report->access = r.access;
#if defined(SI_KERNEL)
      report->misaligned = info->si_code == SI_KERNEL && !address;
#endif
      const char* guard = stacks + thread_index() * fiber_stack_bytes;
      if (address >= slots && address < slots + slot_bytes * max_buffers) {
        u32 i = static_cast<u32>((address - slots) / slot_bytes);
        report->kind = static_cast<u32>(Kind::out_of_bounds);
        report->buffer = static_cast<int>(i);
        report->offset_bytes = address - static_cast<char*>(arguments[i]);
      } else if (address >= guard && address < guard + stack_guard_bytes) {
        what = "the thread's stack overflowed";
      } else {
        what = report->misaligned ? "a vector access at an address that is no multiple of its size"
                                  : "access to memory that no buffer owns";
      }
    }
  }
  copy_text(report->message, sizeof report->message, what);
  if (report->misaligned || harmless) {
    // No reason to die: leave the handler for the loop, with the signals as they were.
    sigprocmask(SIG_SETMASK, &static_cast<ucontext_t*>(context)->uc_sigmask, nullptr);
    failed = true;
    void* dropped;
    lily_switch(&dropped, main_sp);
  }
  reply('D');
  _exit(1);
}

void set_timer(u32 limit_ms) {
  u32 tick_ms = limit_ms < 1000 ? limit_ms : 1000;
  itimerval timer = {};
  timer.it_interval.tv_sec = timer.it_value.tv_sec = tick_ms / 1000;
  timer.it_interval.tv_usec = timer.it_value.tv_usec = static_cast<int>(tick_ms % 1000 * 1000);
  setitimer(ITIMER_REAL, &timer, nullptr);
}

void on_alarm(int number, siginfo_t* info, void* context) {
  if (getppid() != parent) _exit(0);
  if (!running || now_ns() < deadline_ns) return;
  // Between two threads, and in code that has no line of its own, look again a millisecond later.
  if (looks++ < 200) {
    Registers r = registers(context);
    if (thread_on(r) < 0 || !locate_fault(r).column) return set_timer(1);
  }
  on_fault(number, info, context);
}

void install(int number, void (*handler)(int, siginfo_t*, void*)) {
  struct sigaction action = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(number, &action, nullptr);
}

// -------------------------------------------------------------------------------------------------- loop

bool load_kernel() {
  void* library = dlopen(request->path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    copy_text(report->message, sizeof report->message, dlerror());
    return false;
  }
  auto symbol = [library](const char* name) { return dlsym(library, name); };
  Kernel k = {};
  k.entry = reinterpret_cast<void (*)(void* const*)>(symbol("lily_entry"));
  auto range = static_cast<u8* const*>(symbol("lily_threadgroup_range"));
  k.threadgroup_begin = range[0];
  k.threadgroup_end = range[1];
  range = static_cast<u8* const*>(symbol("lily_fill_range"));
  k.fill_begin = range[0];
  k.fill_end = range[1];
  k.lines = static_cast<const LineEntry*>(symbol("lily_lines"));
  k.lines_end = static_cast<const LineEntry*>(symbol("lily_lines_end"));
  k.files = static_cast<const char*>(symbol("lily_files"));
  k.arrays = static_cast<const ArrayEntry*>(symbol("lily_arrays"));
  k.arrays_end = static_cast<const ArrayEntry*>(symbol("lily_arrays_end"));
  k.array_names = static_cast<const char*>(symbol("lily_array_names"));
  k.code_begin = reinterpret_cast<const char*>(~size(0));
  for (const LineEntry* e = k.lines; e < k.lines_end; ++e) {
    const char* code = reinterpret_cast<const char*>(&e->code) + e->code;
    if (code < k.code_begin) k.code_begin = code;
    // The last line's instructions are few; no other code of the kernel follows them.
    if (code + 4096 > k.code_end) k.code_end = code + 4096;
  }
  reinterpret_cast<void (*)(const Host*)>(symbol("lily_bind"))(&host);
  if (kernel_count % 64 == 0)
    kernels = static_cast<Kernel*>(realloc(kernels, (kernel_count + 64) * sizeof(Kernel)));
  kernels[kernel_count] = k;
  report->kernel = kernel_count++;
  for (const ArrayEntry* a = k.arrays; a < k.arrays_end; ++a) report->threadgroup_bytes += (a->bytes + 15) / 16 * 16;
  return true;
}

char run_kernel() {
  kernel = &kernels[request->kernel];
  current = &fibers[0].info;
  failed = false;
  if (!map_buffers()) {
    snprintf(report->message, sizeof report->message, "cannot map the buffers: %s", strerror(errno));
    return 'E';
  }
  deadline_ns = now_ns() + u64(request->time_limit_ms) * 1000000u;
  looks = 0;
  set_timer(request->time_limit_ms);
  memset(kernel->fill_begin, request->poison, kernel->fill_end - kernel->fill_begin);
  running = 1;
  run_grid();
  running = 0;
  set_timer(0);
  if (failed) drop_fibers();
  return failed ? 'F' : 'O';
}

// Waits for the parent's byte. False when the parent is gone: its end of the pipe is closed, or, should
// another process hold that end too, it is no longer our parent.
bool wait_for_request(int request_fd) {
  for (;;) {
    pollfd p = {request_fd, POLLIN, 0};
    int n = poll(&p, 1, 1000);
    if (getppid() != parent) return false;
    if (n <= 0) continue;
    char byte;
    ssize_t got = read(request_fd, &byte, 1);
    if (got == 1) return true;
    if (got == 0 || errno != EINTR) return false;
  }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int lily_worker(int arena, int requests, int replies, int parent_id) {
  arena_fd = arena;
  reply_fd = replies;
  parent = parent_id;
  stack_guard_bytes = static_cast<size>(sysconf(_SC_PAGESIZE));
  control = static_cast<u8*>(mmap(nullptr, control_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, arena, 0));
  if (control == MAP_FAILED) return 1;
  report = reinterpret_cast<Report*>(control + report_offset);
  request = reinterpret_cast<Request*>(control + request_offset);

  // 128 GB a slot: a wrapped 32-bit index of 8-byte elements stays inside. Less where addresses are scarce.
  size bytes_per_slot = size(128) << 30;
  while (!reserve(bytes_per_slot))
    if ((bytes_per_slot /= 2) < (size(1) << 28)) return 1;
  void* stack_memory = mmap(nullptr, max_threads * fiber_stack_bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (stack_memory == MAP_FAILED) return 1;
  stacks = static_cast<char*>(stack_memory);
  for (u32 i = 0; i < max_threads; ++i) mprotect(stacks + i * fiber_stack_bytes, stack_guard_bytes, PROT_NONE);

  stack_t alternate = {};
  alternate.ss_size = 64 << 10;
  alternate.ss_sp = malloc(alternate.ss_size);
  sigaltstack(&alternate, nullptr);
  const int fatal[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP};
  for (int number : fatal) install(number, on_fault);
  install(SIGALRM, on_alarm);
  signal(SIGINT, SIG_IGN);

  while (wait_for_request(requests)) {
    memset(report, 0, sizeof *report);
    report->buffer = -1;
    reply(request->command == load ? (load_kernel() ? 'O' : 'E') : run_kernel());
  }
  return 0;
}
