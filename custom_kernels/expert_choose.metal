// Routing of many tokens, first half: the experts of each token, their weights, and how often a threadgroup's tokens
// chose each expert. expert_scatter.metal is the second half; expert_route.metal is both, for few tokens.
//
//   experts[t] = the TOP_K experts with the largest logits, by index; weights[t] = softmax over their logits
//
//   logits   [T, E + 1]        LogitT  router, then the shared expert's gate
//   sizes    [8]               i32     T, ...
//   weights  [T, TOP_K + 1]    f32     the last is the sigmoid of the shared expert's gate
//   experts  [T, TOP_K]        i32     ascending
//   counts   [CHUNKS, WORDS]   u32     two experts a word, 16 bits each; WORDS = 4 * ceil(E / 8)
//
// Among equal logits the lower index is chosen. NaN ranks below everything, so that indices are always in range.
//
// Who owns what: a threadgroup owns TOKENS tokens, a simdgroup every SIMDGROUPS-th of them.
//
// Limits: E <= 1,024; TOP_K <= E and 31; T < 65,536.

#include "common/expert_groups.h"

template <typename LogitT, int E, int TOP_K, int TOKENS, int SIMDGROUPS>
LILY_INLINE void expert_choose(
    LILY_DEVICE const LogitT* logits,
    LILY_DEVICE const i32* sizes,
    LILY_DEVICE f32* weights,
    LILY_DEVICE i32* experts,
    LILY_DEVICE u32* counts,
    LILY_THREADGROUP i32* chosen,
    LILY_THREADGROUP u32* own_counts,
    uint chunk,
    uint thread_index,
    uint simdgroup,
    uint lane) {
  using Counts = lily_expert_counts<E>;
  const int first = int(chunk) * TOKENS;
  const int last = lily_min(first + TOKENS, sizes[0]);
  Counts::clear(own_counts, thread_index, 32 * SIMDGROUPS);
  lily_threadgroup_barrier();
  lily_expert_choice<LogitT, E, TOP_K, SIMDGROUPS> choice = {logits, experts, weights, chosen, simdgroup, lane};
  choice.run(own_counts, first, last);
  lily_threadgroup_barrier();
  for (int i = int(thread_index); i < Counts::WORDS; i += 32 * SIMDGROUPS) {
    counts[i64(chunk) * Counts::WORDS + i] = own_counts[i];
  }
}

// ---- body ----
LILY_THREADGROUP_ARRAY(i32, chosen, SIMDGROUPS * TOP_K);
LILY_THREADGROUP_ARRAY(u32, own_counts, lily_expert_counts<E>::WORDS);
expert_choose<LogitT, E, TOP_K, TOKENS, SIMDGROUPS>(
    logits, sizes, weights, experts, counts, chosen, own_counts, threadgroup_position_in_grid.x,
    thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
