// Tokens grouped by expert: the choice for every token, and from it the rows in the order of their experts, with
// the map of blocks that a grouped product works through.
//
// Grouped row r holds token * (TOP_K + 1) + slot: the token, and the place of the row's expert among the token's
// chosen ones. Rows are in the order of experts and within an expert of tokens; group E, the shared expert's, comes
// last, has every token and slot TOP_K.
//
// Counts of two neighbouring experts share a word, 16 bits each: so fewer than 65,536 tokens.

#include "common/gates.h"
#include "common/route.h"

template <int E>
struct lily_expert_counts {
  enum : int { WORDS = (E + 7) / 8 * 4 };  // whole 16-byte loads

  static LILY_INLINE void clear(LILY_THREADGROUP u32* counts, uint thread_index, int threads) {
    for (int i = int(thread_index); i < WORDS; i += threads) {
      counts[i] = 0u;
    }
  }

  // Sums of integers do not depend on their order.
  static LILY_INLINE void add_one(LILY_THREADGROUP u32* counts, int expert) {
    lily_atomic_add(counts + expert / 2, expert % 2 == 0 ? 1u : 0x10000u);
  }

  static LILY_INLINE int get(LILY_THREADGROUP const u32* counts, int expert) {
    return int(expert % 2 == 0 ? counts[expert / 2] & 0xffffu : counts[expert / 2] >> 16);
  }
};

// The choice for the tokens of a threadgroup, one after another in each simdgroup.
template <typename LogitT, int E, int TOP_K, int SIMDGROUPS>
struct lily_expert_choice {
  LILY_DEVICE const LogitT* logits;  // [T, E + 1]
  LILY_DEVICE i32* experts;          // [T, TOP_K]
  LILY_DEVICE f32* weights;          // [T, TOP_K + 1]
  LILY_THREADGROUP i32* chosen;      // [SIMDGROUPS, TOP_K]
  uint simdgroup;
  uint lane;

  // Adds the tokens [first, last) to counts, which are cleared. A threadgroup barrier must follow.
  LILY_INLINE void run(LILY_THREADGROUP u32* counts, int first, int last) {
    LILY_THREADGROUP i32* own = chosen + int(simdgroup) * TOP_K;
    LILY_NO_UNROLL
    for (int token = first + int(simdgroup); token < last; token += SIMDGROUPS) {
      LILY_DEVICE const LogitT* token_logits = logits + i64(token) * (E + 1);
      lily_route<E, TOP_K>(token_logits, own, lane);
      lily_simdgroup_barrier();
      const int expert = int(lane) < TOP_K ? own[lane] : int(E);
      const f32 logit = lily_to_f32(token_logits[expert]);
      const f32 routed = lily_routing_weight<TOP_K>(logit, lane);
      if (int(lane) < TOP_K) {
        experts[i64(token) * TOP_K + int(lane)] = expert;
        lily_expert_counts<E>::add_one(counts, expert);
      }
      if (int(lane) <= TOP_K) {
        weights[i64(token) * (TOP_K + 1) + int(lane)] = int(lane) < TOP_K ? routed : lily_sigmoid(logit);
      }
      lily_simdgroup_barrier();  // before the next token's choice replaces this one
    }
  }
};

// Rows of at most TOKENS tokens into their groups, by a threadgroup of SIMDGROUPS simdgroups.
//
// A row's place in its group is the number of earlier tokens with the same expert: those before the threadgroup's,
// counted, and among its own the bits below the token's in the expert's marks.
template <int E, int TOP_K, int TOKENS, int SIMDGROUPS>
struct lily_expert_groups {
  using Counts = lily_expert_counts<E>;
  enum : int {
    THREADS = 32 * SIMDGROUPS,
    MARK_WORDS = (TOKENS + 31) / 32,
    MARKS = E * MARK_WORDS,
    STARTS = E + 2,
    PER_LANE = (E + 31) / 32
  };
  LILY_THREADGROUP u32* marks;         // [E, MARK_WORDS], bit t: the threadgroup's token t chose the expert
  LILY_THREADGROUP i32* starts;        // [STARTS], the first row of each group, then the number of rows
  LILY_THREADGROUP i32* first_blocks;  // [STARTS], likewise of blocks
  uint thread_index;
  uint lane;

  LILY_INLINE void clear_marks() {
    for (int i = int(thread_index); i < MARKS; i += THREADS) {
      marks[i] = 0u;
    }
  }

  // Marks the tokens [first, last). A token chooses an expert once, so that adding a bit is setting it.
  LILY_INLINE void mark(LILY_DEVICE const i32* experts, int first, int last) {
    for (int i = first * TOP_K + int(thread_index); i < last * TOP_K; i += THREADS) {
      const int token = i / TOP_K - first;
      lily_atomic_add(marks + experts[i] * MARK_WORDS + token / 32, 1u << (token % 32));
    }
  }

  // Groups and blocks begin where those before end; for one simdgroup, whose lanes have neighbouring experts.
  LILY_INLINE void place_groups(LILY_THREADGROUP const u32* totals, int tokens, int block_rows) {
    int rows[PER_LANE];
    int all_rows = 0;
    int all_blocks = 0;
    LILY_UNROLL
    for (int i = 0; i < PER_LANE; ++i) {
      const int expert = int(lane) * PER_LANE + i;
      rows[i] = expert < E ? Counts::get(totals, expert) : 0;
      all_rows += rows[i];
      all_blocks += (rows[i] + block_rows - 1) / block_rows;
    }
    int start = lily_simd_prefix_sum(all_rows);
    int first_block = lily_simd_prefix_sum(all_blocks);
    LILY_UNROLL
    for (int i = 0; i < PER_LANE; ++i) {
      const int expert = int(lane) * PER_LANE + i;
      if (expert < E) {
        starts[expert] = start;
        first_blocks[expert] = first_block;
      }
      start += rows[i];
      first_block += (rows[i] + block_rows - 1) / block_rows;
    }
    if (lane == 31) {
      starts[E] = start;
      first_blocks[E] = first_block;
      starts[E + 1] = start + tokens;
      first_blocks[E + 1] = first_block + (tokens + block_rows - 1) / block_rows;
    }
  }

  // The rows of the tokens [first, last); before: counts of the tokens below first.
  LILY_INLINE void write_rows(
      LILY_DEVICE i32* rows,
      LILY_DEVICE const i32* experts,
      LILY_THREADGROUP const u32* before,
      int first,
      int last) {
    for (int i = first * TOP_K + int(thread_index); i < last * TOP_K; i += THREADS) {
      const int token = i / TOP_K;
      const int bit = token - first;
      const int expert = experts[i];
      int place = starts[expert] + Counts::get(before, expert);
      LILY_UNROLL
      for (int word = 0; word < MARK_WORDS; ++word) {
        // Not 32 compared with a number kept within 0 and 32: of that, ptxas 13.0 makes wrong code for sm_90.
        const u32 below = word == bit / 32 ? (1u << (bit % 32)) - 1u : word < bit / 32 ? 0xffffffffu : 0u;
        place += int(lily_popcount(marks[expert * MARK_WORDS + word] & below));
      }
      rows[place] = i + token;  // token * (TOP_K + 1) + slot
    }
    for (int token = first + int(thread_index); token < last; token += THREADS) {
      rows[starts[E] + token] = token * (TOP_K + 1) + TOP_K;
    }
  }

  // This threadgroup's share of the map [blocks_size, 4]: every `stride`-th block from `first` on.
  LILY_INLINE void write_blocks(LILY_DEVICE i32* blocks, int blocks_size, int block_rows, int first, int stride) {
    const int used = first_blocks[E + 1];
    for (int block = first; block < blocks_size; block += stride) {
      int expert = 0;
      int row = 0;
      int rows = 0;
      if (block < used) {
        // The last group that begins at or before the block: one without blocks begins where the next one does.
        int above = E + 1;
        while (above - expert > 1) {
          const int middle = (expert + above) / 2;
          if (first_blocks[middle] <= block) {
            expert = middle;
          } else {
            above = middle;
          }
        }
        row = starts[expert] + (block - first_blocks[expert]) * block_rows;
        rows = lily_min(block_rows, starts[expert + 1] - row);
      }
      LILY_DEVICE i32* entry = blocks + block * 4;
      entry[0] = expert;
      entry[1] = row;
      entry[2] = rows;
      entry[3] = 0;
    }
  }

  // count [8]: the number of blocks in use, then zeros.
  LILY_INLINE void write_count(LILY_DEVICE i32* count) {
    if (thread_index < 8u) {
      count[thread_index] = thread_index == 0u ? first_blocks[E + 1] : 0;
    }
  }
};
