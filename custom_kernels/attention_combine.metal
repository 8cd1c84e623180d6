// The second pass of decode attention: sums over blocks of rows become the output.
//
//   M = max_b m_b,  out = sum_b 2^(m_b - M) partial_b / sum_b 2^(m_b - M) l_b * sigmoid(gate)
//
//   partials     [*]              f32   [BLOCKS, Hq, D] partial, then
//                                       [Hq, BLOCKS, 2] m_b and l_b: largest score in bits (log2), sum of
//                                       2^(score - largest)
//   projected    [*]              T     the output gate of head h is D elements at GATE_OFFSET + h GATE_STRIDE
//   out          [1, 1, N]        T     N = Hq D
//
// Who owns what: a threadgroup owns 32 UNIT columns of one head, a lane UNIT neighbours of them; a simdgroup sums every
// SIMDGROUPS-th block, BATCH of them read at once.
//
// Limits: D a multiple of 32 UNIT; UNIT 1, 2 or 4.
//
// Why this order: the kernel is one trip to memory. Sums, figures and gate are requested before any of them is used.
// Every simdgroup computes M and the divisor itself: both are a few hundred bytes, and the alternative is a barrier.

#include "common/gates.h"

template <typename T, int BLOCKS, int Hq, int D, int UNIT, int SIMDGROUPS, int GATE_OFFSET, int GATE_STRIDE>
LILY_INLINE void attention_combine(
    LILY_DEVICE const f32* partials,
    LILY_DEVICE const T* projected,
    LILY_DEVICE T* out,
    LILY_THREADGROUP f32* merged,  // [SIMDGROUPS, 32 UNIT]
    uint column_block,
    uint head,
    uint thread_index,
    uint simdgroup,
    uint lane) {
  static_assert(D % (32 * UNIT) == 0, "threadgroups have whole columns");
  constexpr int COLUMNS = 32 * UNIT;
  constexpr int THREADS = 32 * SIMDGROUPS;
  constexpr int OUTPUTS_PER_THREAD = (COLUMNS + THREADS - 1) / THREADS;
  constexpr int BLOCKS_PER_SIMDGROUP = (BLOCKS + SIMDGROUPS - 1) / SIMDGROUPS;
  constexpr int BATCH = BLOCKS_PER_SIMDGROUP < 8 ? BLOCKS_PER_SIMDGROUP : 8;
  constexpr int BLOCKS_PER_LANE = (BLOCKS + 31) / 32;
  const int first_column = int(column_block) * COLUMNS;
  LILY_DEVICE const f32* stats = partials + i64(BLOCKS) * (Hq * D) + i64(head) * (BLOCKS * 2);
  partials += int(head) * D + first_column + int(lane) * UNIT;

  // Past the last block the last one is read again, and counts nothing.
  lily_vec<f32, UNIT> words[BATCH];
  f32 of_block[BATCH];
  LILY_UNROLL
  for (int i = 0; i < BATCH; ++i) {
    const int b = lily_min(i * SIMDGROUPS + int(simdgroup), BLOCKS - 1);
    words[i] = lily_load<UNIT>(partials + i64(b) * (Hq * D));
    of_block[i] = stats[b * 2];
  }
  T gates[OUTPUTS_PER_THREAD];
  LILY_UNROLL
  for (int i = 0; i < OUTPUTS_PER_THREAD; ++i) {
    const int column = first_column + lily_min(i * THREADS + int(thread_index), COLUMNS - 1);
    gates[i] = projected[GATE_OFFSET + int(head) * GATE_STRIDE + column];
  }
  // Each lane's blocks are rescaled to its own largest, so that the figures are read once.
  f32 largest = -1e30f;
  f32 total = 0.0f;
  LILY_UNROLL
  for (int i = 0; i < BLOCKS_PER_LANE; ++i) {
    const int b = i * 32 + int(lane);
    f32 pair[2];
    lily_unpack(lily_load<2>(stats + lily_min(b, BLOCKS - 1) * 2), pair);
    const f32 new_largest = lily_max(largest, pair[0]);
    total = total * lily_fast_exp2(largest - new_largest) +
        (b < BLOCKS ? pair[1] * lily_fast_exp2(pair[0] - new_largest) : 0.0f);
    largest = new_largest;
  }
  const f32 own_largest = largest;
  largest = lily_simd_max(largest);
  total = lily_simd_sum(total * lily_fast_exp2(own_largest - largest));

  f32 sums[UNIT];
  LILY_UNROLL
  for (int c = 0; c < UNIT; ++c) {
    sums[c] = 0.0f;
  }
  LILY_UNROLL
  for (int first = 0; first < BLOCKS_PER_SIMDGROUP; first += BATCH) {
    LILY_UNROLL
    for (int i = 0; i < BATCH; ++i) {
      const int b = (first + i) * SIMDGROUPS + int(simdgroup);
      f32 values[UNIT];
      lily_unpack(words[i], values);
      const f32 weight = b < BLOCKS ? lily_fast_exp2(of_block[i] - largest) : 0.0f;
      LILY_UNROLL
      for (int c = 0; c < UNIT; ++c) {
        sums[c] = lily_fma(weight, values[c], sums[c]);
      }
      if (first + BATCH < BLOCKS_PER_SIMDGROUP) {
        const int next = lily_min(b + BATCH * SIMDGROUPS, BLOCKS - 1);
        words[i] = lily_load<UNIT>(partials + i64(next) * (Hq * D));
        of_block[i] = stats[next * 2];
      }
    }
  }
  lily_store<UNIT>(merged + int(simdgroup) * COLUMNS + int(lane) * UNIT, lily_pack<f32, UNIT>(sums));
  lily_threadgroup_barrier();
  LILY_UNROLL
  for (int i = 0; i < OUTPUTS_PER_THREAD; ++i) {
    const int column = i * THREADS + int(thread_index);
    if (column < COLUMNS) {
      f32 sum = 0.0f;
      LILY_UNROLL
      for (int s = 0; s < SIMDGROUPS; ++s) {
        sum += merged[s * COLUMNS + column];
      }
      out[int(head) * D + first_column + column] =
          lily_from_f32<T>(sum / total * lily_sigmoid(lily_to_f32(gates[i])));
    }
  }
}

// ---- body ----
LILY_THREADGROUP_ARRAY(f32, merged, SIMDGROUPS * 32 * UNIT);
attention_combine<T, BLOCKS, Hq, D, UNIT, SIMDGROUPS, GATE_OFFSET, GATE_STRIDE>(
    partials, projected, out, merged, threadgroup_position_in_grid.x, threadgroup_position_in_grid.y,
    thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
