// The second pass of decode attention: sums over blocks of rows become the output.
//
//   M = max_b m_b,  out = sum_b 2^(m_b - M) partial_b / sum_b 2^(m_b - M) l_b * sigmoid(gate)
//
//   partial      [BLOCKS, Hq, D]  f32
//   stats        [BLOCKS, Hq, 2]  f32   m_b and l_b: largest score in bits (log2), sum of 2^(score - largest)
//   projected    [*]              T     the output gate of head h is D elements at GATE_OFFSET + h GATE_STRIDE
//   sizes        [8]              i32   sizes[0] = BLOCKS
//   out          [1, 1, N]        T     N = Hq D
//
// Who owns what: a threadgroup owns 32 UNIT columns of one head, a lane UNIT neighbours of them; a simdgroup sums every
// SIMDGROUPS-th block, BATCH of them read at once.
//
// Limits: D a multiple of 32 UNIT; UNIT 1, 2 or 4.
//
// Why every simdgroup computes M and the divisor itself: both are a few hundred bytes, and the alternative is a barrier.

#include "common/gates.h"

template <typename T, int Hq, int D, int UNIT, int SIMDGROUPS, int GATE_OFFSET, int GATE_STRIDE>
LILY_INLINE void attention_combine(
    LILY_DEVICE const f32* partial,
    LILY_DEVICE const f32* stats,
    LILY_DEVICE const T* projected,
    LILY_DEVICE const i32* sizes,
    LILY_DEVICE T* out,
    LILY_THREADGROUP f32* merged,  // [SIMDGROUPS, 32 UNIT]
    uint column_block,
    uint head,
    uint thread_index,
    uint simdgroup,
    uint lane) {
  static_assert(D % (32 * UNIT) == 0, "threadgroups have whole columns");
  constexpr int BATCH = 4;
  constexpr int COLUMNS = 32 * UNIT;
  const int blocks = sizes[0];
  const int first_column = int(column_block) * COLUMNS;
  stats += int(head) * 2;
  partial += int(head) * D + first_column + int(lane) * UNIT;

  f32 largest = -1e30f;
  for (int b = int(lane); b < blocks; b += 32) {
    largest = lily_max(largest, stats[i64(b) * (Hq * 2)]);
  }
  largest = lily_simd_max(largest);
  f32 total = 0.0f;
  for (int b = int(lane); b < blocks; b += 32) {
    LILY_DEVICE const f32* of_block = stats + i64(b) * (Hq * 2);
    total += of_block[1] * lily_fast_exp2(of_block[0] - largest);
  }
  total = lily_simd_sum(total);

  f32 sums[UNIT];
  LILY_UNROLL
  for (int c = 0; c < UNIT; ++c) {
    sums[c] = 0.0f;
  }
  LILY_NO_UNROLL
  for (int first = int(simdgroup); first < blocks; first += BATCH * SIMDGROUPS) {
    lily_vec<f32, UNIT> words[BATCH];
    f32 weights[BATCH];
    LILY_UNROLL
    for (int i = 0; i < BATCH; ++i) {
      // Past the last block the last one is read again, and counts nothing.
      const int b = first + i * SIMDGROUPS;
      const i64 existing = lily_min(b, blocks - 1);
      words[i] = lily_load<UNIT>(partial + existing * (Hq * D));
      weights[i] = b < blocks ? lily_fast_exp2(stats[existing * (Hq * 2)] - largest) : 0.0f;
    }
    LILY_UNROLL
    for (int i = 0; i < BATCH; ++i) {
      f32 values[UNIT];
      lily_unpack(words[i], values);
      LILY_UNROLL
      for (int c = 0; c < UNIT; ++c) {
        sums[c] = lily_fma(weights[i], values[c], sums[c]);
      }
    }
  }
  lily_store<UNIT>(merged + int(simdgroup) * COLUMNS + int(lane) * UNIT, lily_pack<f32, UNIT>(sums));
  lily_threadgroup_barrier();
  for (int i = int(thread_index); i < COLUMNS; i += SIMDGROUPS * 32) {
    f32 sum = 0.0f;
    LILY_UNROLL
    for (int s = 0; s < SIMDGROUPS; ++s) {
      sum += merged[s * COLUMNS + i];
    }
    const int column = first_column + i;
    const f32 gate = lily_to_f32(projected[GATE_OFFSET + int(head) * GATE_STRIDE + column]);
    out[int(head) * D + column] = lily_from_f32<T>(sum / total * lily_sigmoid(gate));
  }
}

// ---- body ----
LILY_THREADGROUP_ARRAY(f32, merged, SIMDGROUPS * 32 * UNIT);
attention_combine<T, Hq, D, UNIT, SIMDGROUPS, GATE_OFFSET, GATE_STRIDE>(
    partial, stats, projected, sizes, out, merged, threadgroup_position_in_grid.x, threadgroup_position_in_grid.y,
    thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
