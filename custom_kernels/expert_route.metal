// Routing of a few tokens in one threadgroup: experts, weights, rows grouped by expert, and the map of their blocks.
// expert_choose.metal and expert_scatter.metal do the same for many.
//
//   logits   [T, E + 1]        LogitT  router, then the shared expert's gate
//   sizes    [8]               i32     T, rows of a block, size of blocks
//   weights  [T, TOP_K + 1]    f32     the last is the sigmoid of the shared expert's gate
//   rows     [T * (TOP_K + 1)] i32     token * (TOP_K + 1) + slot, see common/expert_groups.h
//   blocks   [size, 4]         i32     expert, first row, number of rows, 0; those in use come first
//   count    [8]               i32     blocks in use, then zeros
//   experts  [T, TOP_K]        i32     ascending
//
// Who owns what: a simdgroup chooses for every SIMDGROUPS-th token, then a thread has every so-many-th row and block.
//
// Limits: T <= TOKENS; E <= 1,024; TOP_K <= E and 31.

#include "common/expert_groups.h"

template <typename LogitT, int E, int TOP_K, int TOKENS, int SIMDGROUPS>
struct ExpertRoute {
  using Counts = lily_expert_counts<E>;
  using Choice = lily_expert_choice<LogitT, E, TOP_K, SIMDGROUPS>;
  using Groups = lily_expert_groups<E, TOP_K, TOKENS, SIMDGROUPS>;
  enum : int { THREADS = 32 * SIMDGROUPS };

  LILY_DEVICE const LogitT* logits;
  LILY_DEVICE const i32* sizes;
  LILY_DEVICE f32* weights;
  LILY_DEVICE i32* rows;
  LILY_DEVICE i32* blocks;
  LILY_DEVICE i32* count;
  LILY_DEVICE i32* experts;
  LILY_THREADGROUP i32* chosen;        // [SIMDGROUPS, TOP_K]
  LILY_THREADGROUP u32* totals;        // [WORDS]
  LILY_THREADGROUP u32* before;        // [WORDS], zeros: there are no earlier tokens
  LILY_THREADGROUP u32* marks;         // see Groups
  LILY_THREADGROUP i32* starts;        // see Groups
  LILY_THREADGROUP i32* first_blocks;  // see Groups
  uint thread_index;
  uint simdgroup;
  uint lane;

  LILY_INLINE void run() {
    const int tokens = sizes[0];
    const int block_rows = sizes[1];
    Choice choice = {logits, experts, weights, chosen, simdgroup, lane};
    Groups groups = {marks, starts, first_blocks, thread_index, lane};
    Counts::clear(totals, thread_index, THREADS);
    Counts::clear(before, thread_index, THREADS);
    groups.clear_marks();
    lily_threadgroup_barrier();
    choice.run(totals, 0, tokens);
    lily_threadgroup_barrier_device();
    groups.mark(experts, 0, tokens);
    if (simdgroup == 0) {
      groups.place_groups(totals, tokens, block_rows);
    }
    lily_threadgroup_barrier();
    groups.write_rows(rows, experts, before, 0, tokens);
    groups.write_blocks(blocks, sizes[2], block_rows, int(thread_index), THREADS);
    groups.write_count(count);
  }
};

// ---- body ----
using Op = ExpertRoute<LogitT, E, TOP_K, TOKENS, SIMDGROUPS>;
LILY_THREADGROUP_ARRAY(i32, chosen, SIMDGROUPS * TOP_K);
LILY_THREADGROUP_ARRAY(u32, totals, lily_expert_counts<E>::WORDS);
LILY_THREADGROUP_ARRAY(u32, before, lily_expert_counts<E>::WORDS);
LILY_THREADGROUP_ARRAY(u32, marks, Op::Groups::MARKS);
LILY_THREADGROUP_ARRAY(i32, starts, Op::Groups::STARTS);
LILY_THREADGROUP_ARRAY(i32, first_blocks, Op::Groups::STARTS);
Op expert_route = {
    logits, sizes, weights, rows, blocks, count, experts, chosen, totals, before, marks, starts, first_blocks,
    thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup};
expert_route.run();
