// A matrix of affine-quantised weights times one vector.
//
//   y = W x                                                 W [N, K]
//   with HAS_NORM      y = W (x * norm_weight) / sqrt(mean(x^2) + eps)
//   with HAS_RESIDUAL  y = y + residual
//
//   x            [K]            InT
//   matrix       [*]            u32     weights [N, K*BITS/32], numbers from the low bits on, then scales and biases
//                                       [N, K/GROUP] ScaleT, see common/packed_rows.h
//   norm_weight  [K]            NormT   HAS_NORM
//   residual     [N]            InT     HAS_RESIDUAL
//   y            [N]            OutT
//
// Who owns what: a threadgroup puts x (times norm_weight) into threadgroup memory once; then each simdgroup goes
// through REPEAT blocks of 32 / LANES * ROWS rows, LANES lanes a row (32 unless K is small), each lane reading
// 16 bytes of every row in turn, see common/packed_rows.h.
//
// Limits: K a multiple of 32 and of GROUP; N >= ROWS; threadgroup memory of 5.5 * K bytes.
//
// Why this order: the first weights are requested before x is, so that their way from memory overlaps with all
// that is done to x. The factor of the norm does not depend on the row, so it is applied to the sums.
//
// The last block is moved up so that it ends with the matrix; rows that it shares with the block before are
// computed twice and written once.

#include "common/packed_rows.h"

template <
    typename InT, typename OutT, typename ScaleT, int N, int K, int GROUP, int BITS, int EPS_BITS,
    bool HAS_NORM, bool HAS_RESIDUAL, int ROWS, int REPEAT, int AHEAD, int SIMDGROUPS, typename NormT, typename ResidualT>
LILY_INLINE void qmv(
    LILY_DEVICE const InT* x,
    LILY_DEVICE const u32* matrix,
    LILY_DEVICE const NormT* norm_weight,
    LILY_DEVICE const ResidualT* residual,
    LILY_DEVICE OutT* y,
    LILY_THREADGROUP f32* memory,
    int block,
    uint thread_index,
    uint simdgroup,
    uint lane) {
  using Rows = lily_packed_rows<ScaleT, BITS, GROUP, K, ROWS, AHEAD, 32>;
  enum : int { CHUNKS = Rows::CHUNKS, DEPTH = Rows::DEPTH, STEP = SIMDGROUPS * Rows::BLOCK_ROWS };
  static_assert(ROWS <= N, "a block of rows fits into the matrix");
  lily_shared_vector<K, SIMDGROUPS> vector;
  vector.memory = memory;

  const auto parts = lily_packed_matrix<ScaleT>::at(matrix, i64(N) * (K * BITS / 32), i64(N) * (K / GROUP));
  const int last = N - ROWS;
  int row = block * (STEP * REPEAT) + int(simdgroup) * Rows::BLOCK_ROWS + Rows::row_in_block(lane);
  Rows rows;
  rows.start(parts.weight, parts.scales, parts.biases, lily_min(row, last));
  rows.load_first(lane);
  vector.template fill<HAS_NORM>(x, norm_weight, thread_index, lane);
  lily_threadgroup_barrier();
  const f32 factor = HAS_NORM ? vector.inverse_rms(lily_f32_from_bits(u32(EPS_BITS))) : 1.0f;

  LILY_NO_UNROLL
  for (int i = 0; i < REPEAT; ++i) {
    const int first = lily_min(row, last);
    const int owned = first + Rows::owned_row(lane);
    f32 added[Rows::OWNED];
    LILY_UNROLL
    for (int r = 0; r < Rows::OWNED; ++r) {
      added[r] = 0.0f;
      if constexpr (HAS_RESIDUAL) {
        added[r] = lily_to_f32(residual[owned + r]);
      }
    }
    rows.clear();
    LILY_UNROLL
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      lily_operand<BITS> operand;
      vector.read(Rows::column(chunk, lane), operand);
      rows.accumulate(chunk, operand);
      if (chunk + DEPTH < CHUNKS) {
        rows.load(chunk + DEPTH, lane);
      } else if (i + 1 < REPEAT) {
        if (chunk + DEPTH == CHUNKS) {
          rows.start(parts.weight, parts.scales, parts.biases, lily_min(row + STEP, last));
        }
        rows.load(chunk + DEPTH - CHUNKS, lane);
      }
    }
    rows.reduce(lane);
    LILY_UNROLL
    for (int r = 0; r < Rows::OWNED; ++r) {
      if (Rows::owns(lane) && owned + r >= row) {
        y[owned + r] = lily_from_f32<OutT>(lily_fma(rows.sums[r], factor, added[r]));
      }
    }
    row += STEP;
  }
}

// ---- body ----
LILY_THREADGROUP_ARRAY(f32, memory, (lily_shared_vector<K, SIMDGROUPS>::FLOATS));
qmv<InT, OutT, ScaleT, N, K, GROUP, BITS, EPS_BITS, HAS_NORM, HAS_RESIDUAL, ROWS, REPEAT, AHEAD, SIMDGROUPS>(
    x, matrix, norm_weight, residual, y, memory, int(threadgroup_position_in_grid.x),
    thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
