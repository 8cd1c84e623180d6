// Routing of many tokens, second half: rows grouped by expert, and the map of their blocks. expert_choose.metal is
// the first half.
//
//   experts  [T, TOP_K]        i32     chosen, ascending
//   counts   [CHUNKS, WORDS]   u32     of CHUNK_TOKENS tokens each, two experts a word; WORDS = 4 * ceil(E / 8)
//   sizes    [8]               i32     T, rows of a block, size of blocks, CHUNKS
//   rows     [T * (TOP_K + 1)] i32     token * (TOP_K + 1) + slot, see common/expert_groups.h
//   blocks   [size, 4]         i32     expert, first row, number of rows, 0; those in use come first
//   count    [8]               i32     blocks in use, then zeros
//
// Who owns what: a threadgroup owns the rows of TOKENS tokens, and of the map every so-many-th part.
//
// Limits: TOKENS a multiple of CHUNK_TOKENS; T < 65,536.
//
// Why every threadgroup sums all counts: they are 512 bytes a chunk for 256 experts, from the GPU's cache, which
// takes less time than a launch more that would sum them once.

#include "common/expert_groups.h"

template <int E, int TOP_K, int CHUNK_TOKENS, int TOKENS, int SIMDGROUPS>
struct ExpertScatter {
  static_assert(TOKENS % CHUNK_TOKENS == 0, "tokens begin where a chunk does");
  using Counts = lily_expert_counts<E>;
  using Groups = lily_expert_groups<E, TOP_K, TOKENS, SIMDGROUPS>;
  enum : int {
    THREADS = 32 * SIMDGROUPS,
    COLUMNS = Counts::WORDS / 4,  // of four words, 16 bytes
    COLUMNS_AT_ONCE = int(COLUMNS) < int(THREADS) ? int(COLUMNS) : int(THREADS),
    PARTS = int(THREADS) / int(COLUMNS_AT_ONCE)  // of the chunks, summed side by side
  };

  LILY_DEVICE const i32* experts;
  LILY_DEVICE const u32* counts;
  LILY_DEVICE const i32* sizes;
  LILY_DEVICE i32* rows;
  LILY_DEVICE i32* blocks;
  LILY_DEVICE i32* count;
  LILY_THREADGROUP u32* totals;        // [WORDS], of all tokens
  LILY_THREADGROUP u32* before;        // [WORDS], of the tokens before the threadgroup's
  LILY_THREADGROUP u32* marks;         // see Groups
  LILY_THREADGROUP i32* starts;        // see Groups
  LILY_THREADGROUP i32* first_blocks;  // see Groups
  uint thread_index;
  uint simdgroup;
  uint lane;

  // Words are added whole: no half overflows.
  LILY_INLINE void sum_counts(int chunks, int own_chunk) {
    const int part = int(thread_index) / COLUMNS_AT_ONCE;
    if (part >= PARTS) {
      return;
    }
    for (int column = int(thread_index) % COLUMNS_AT_ONCE; column < COLUMNS; column += COLUMNS_AT_ONCE) {
      u32 all[4] = {0u, 0u, 0u, 0u};
      u32 earlier[4] = {0u, 0u, 0u, 0u};
      for (int chunk = part; chunk < chunks; chunk += PARTS) {
        const lily_vec<u32, 4> words = lily_load<4>(counts + chunk * Counts::WORDS + column * 4);
        LILY_UNROLL
        for (int i = 0; i < 4; ++i) {
          all[i] += lily_word(words, i);
          earlier[i] += chunk < own_chunk ? lily_word(words, i) : 0u;
        }
      }
      LILY_UNROLL
      for (int i = 0; i < 4; ++i) {
        lily_atomic_add(totals + column * 4 + i, all[i]);
        lily_atomic_add(before + column * 4 + i, earlier[i]);
      }
    }
  }

  LILY_INLINE void run(int threadgroup_index, int threadgroups) {
    const int tokens = sizes[0];
    const int block_rows = sizes[1];
    const int first = threadgroup_index * TOKENS;
    const int last = lily_min(first + TOKENS, tokens);
    Groups groups = {marks, starts, first_blocks, thread_index, lane};
    Counts::clear(totals, thread_index, THREADS);
    Counts::clear(before, thread_index, THREADS);
    groups.clear_marks();
    lily_threadgroup_barrier();
    groups.mark(experts, first, last);
    sum_counts(sizes[3], first / CHUNK_TOKENS);
    lily_threadgroup_barrier();
    if (simdgroup == 0) {
      groups.place_groups(totals, tokens, block_rows);
    }
    lily_threadgroup_barrier();
    groups.write_rows(rows, experts, before, first, last);
    const int first_block = threadgroup_index * THREADS + int(thread_index);
    groups.write_blocks(blocks, sizes[2], block_rows, first_block, threadgroups * THREADS);
    if (threadgroup_index == 0) {
      groups.write_count(count);
    }
  }
};

// ---- body ----
using Op = ExpertScatter<E, TOP_K, CHUNK_TOKENS, TOKENS, SIMDGROUPS>;
LILY_THREADGROUP_ARRAY(u32, totals, lily_expert_counts<E>::WORDS);
LILY_THREADGROUP_ARRAY(u32, before, lily_expert_counts<E>::WORDS);
LILY_THREADGROUP_ARRAY(u32, marks, Op::Groups::MARKS);
LILY_THREADGROUP_ARRAY(i32, starts, Op::Groups::STARTS);
LILY_THREADGROUP_ARRAY(i32, first_blocks, Op::Groups::STARTS);
Op expert_scatter = {
    experts, counts, sizes, rows, blocks, count, totals, before, marks, starts, first_blocks,
    thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup};
expert_scatter.run(int(threadgroup_position_in_grid.x), int(threadgroups_per_grid.x));
