// Routing, and the first half of the experts: gate and up projections with SwiGLU, of the chosen experts and of
// the shared expert.
//
//   n = x * norm_weight / sqrt(mean(x^2) + eps)
//   experts = the TOP_K experts with the largest logits, the largest first; weights = softmax over their logits
//   h_s = silu(gate_e n) * (up_e n)           e = experts[s]; last comes the shared expert, e = E
//
//   x           [K]                 InT
//   norm_weight [K]                 NormT
//   logits      [E + 1]             LogitT  router, then the shared expert's gate
//   matrices    [*]                 u32     weights [2 (E + 1), M, K * BITS / 32]: gate of every expert and of the
//                                         shared one, then up; then scales and biases [2 (E + 1), M, K / GROUP]
//                                         ScaleT, see common/packed_rows.h
//   chosen      [(TOP_K + 1) (M + 2)] f32   h, expert after expert; experts, as numbers; weights, of which the
//                                         shared expert's is the sigmoid of its gate
//
// Among equal logits the lower index is chosen. NaN ranks below everything, so that indices are always in range.
//
// Who owns what: a threadgroup owns rows of one expert; the shared expert's threadgroups come first. A simdgroup
// owns 32 / LANES * ROWS rows, of the gate and of the up projection, LANES lanes a row, see
// common/packed_rows.h. Every threadgroup that needs the choice makes it, in its first simdgroup, see
// common/rank.h, and the one with the first rows of the first expert also writes it.
//
// Limits: K a multiple of 32 and of GROUP; ROWS <= M; TOP_K <= E and 31; threadgroup memory of 5.5 * K + 8 * E bytes.
//
// Why this order: choosing again in every threadgroup takes less time than a launch more. x and norm_weight are
// requested before the weights, behind which they would wait, and prepared while the weights are on their way.

#include "common/gates.h"
#include "common/packed_rows.h"
#include "common/rank.h"

template <
    typename InT, typename NormT, typename ScaleT, typename LogitT,
    int K, int M, int E, int TOP_K, int GROUP, int BITS, int EPS_BITS, int ROWS, int AHEAD, int SIMDGROUPS>
struct ExpertGateUp {
  static_assert(ROWS <= M, "a block of rows fits into an expert");
  using Rows = lily_packed_rows<ScaleT, BITS, GROUP, K, ROWS, AHEAD, 32>;
  using Vector = lily_shared_vector<K, SIMDGROUPS>;
  using Ranking = lily_ranking<E, TOP_K>;
  enum : int {
    CHUNKS = Rows::CHUNKS,
    DEPTH = Rows::DEPTH,
    THREADGROUP_ROWS = Rows::BLOCK_ROWS * SIMDGROUPS,
    BLOCKS = (M + THREADGROUP_ROWS - 1) / THREADGROUP_ROWS,  // of an expert
    THREADS = SIMDGROUPS * 32,
    UNIT = Vector::UNIT,
    UNITS = (K / UNIT + THREADS - 1) / THREADS,  // of x, of a thread
    EXPERTS_AT = (TOP_K + 1) * M,
    WEIGHTS_AT = EXPERTS_AT + TOP_K + 1
  };

  LILY_DEVICE const LogitT* logits;
  LILY_DEVICE f32* chosen;
  Vector vector;
  Ranking ranking;
  uint thread_index;
  uint simdgroup;
  uint lane;

  // One simdgroup: a lane for each chosen expert, and one for the shared expert. One exponential, one division.
  LILY_INLINE void write_choice() {
    const bool is_chosen = int(lane) < TOP_K;
    const int expert = is_chosen ? ranking.chosen(int(lane)) : int(E);
    const f32 logit = lily_to_f32(logits[expert]);
    const f32 largest = lily_simd_max(is_chosen ? logit : -LILY_INFINITY);
    const f32 exponential = lily_exp(is_chosen ? logit - largest : -logit);
    const f32 sum = lily_simd_sum(is_chosen ? exponential : 0.0f);
    if (int(lane) <= TOP_K) {
      chosen[EXPERTS_AT + int(lane)] = f32(expert);
      chosen[WEIGHTS_AT + int(lane)] = (is_chosen ? exponential : 1.0f) / (is_chosen ? sum : 1.0f + exponential);
    }
  }

  LILY_INLINE void run(
      LILY_DEVICE const InT* x,
      LILY_DEVICE const NormT* norm_weight,
      LILY_DEVICE const u32* matrices,
      int threadgroup_index) {
    const int slot = TOP_K - threadgroup_index / BLOCKS;  // the expert's place in the choice, TOP_K for the shared one
    const int block = threadgroup_index % BLOCKS;
    // The last block is moved up to end with the expert; what it shares with the block before is written once.
    const int row = (block * SIMDGROUPS + int(simdgroup)) * Rows::BLOCK_ROWS + Rows::row_in_block(lane);
    const int first = lily_min(row, M - ROWS);

    lily_vec<InT, UNIT> x_units[UNITS];
    lily_vec<NormT, UNIT> norm_units[UNITS];
    LILY_UNROLL
    for (int i = 0; i < UNITS; ++i) {
      const int k = lily_min((i * THREADS + int(thread_index)) * UNIT, K - UNIT);
      x_units[i] = lily_load<UNIT>(x + k);
      norm_units[i] = lily_load<UNIT>(norm_weight + k);
    }

    int expert = E;
    if (slot < TOP_K) {
      if (simdgroup == 0) {
        ranking.choose(logits, lane);
      }
      lily_threadgroup_barrier();
      expert = ranking.chosen(slot);
    }
    Rows gate;
    Rows up;
    const i64 expert_row = i64(expert) * M + first;
    constexpr i64 ALL_ROWS = i64(2) * (E + 1) * M;
    const auto parts = lily_packed_matrix<ScaleT>::at(matrices, ALL_ROWS * (K * BITS / 32), ALL_ROWS * (K / GROUP));
    gate.start(parts.weight, parts.scales, parts.biases, expert_row);
    up.start(parts.weight, parts.scales, parts.biases, expert_row + i64(E + 1) * M);
    LILY_UNROLL
    for (int chunk = 0; chunk < DEPTH; ++chunk) {
      gate.load(chunk, chunk, lane);
      up.load(chunk, chunk, lane);
    }

    f32 squares = 0.0f;
    LILY_UNROLL
    for (int i = 0; i < UNITS; ++i) {
      const int k = (i * THREADS + int(thread_index)) * UNIT;
      f32 values[UNIT];
      lily_unpack(x_units[i], values);
      const f32 unit_squares = Vector::weigh(values, norm_units[i]);
      if (k < K) {
        squares += unit_squares;
        vector.store(k, values);
      }
    }
    vector.store_starts(thread_index);
    vector.store_squares(squares, thread_index, lane);
    if (slot == 0 && block == 0 && simdgroup == 0) {
      write_choice();
    }
    lily_threadgroup_barrier();

    gate.clear();
    up.clear();
    LILY_NO_UNROLL
    for (int first_chunk = 0; first_chunk < CHUNKS; first_chunk += DEPTH) {
      LILY_UNROLL
      for (int place = 0; place < DEPTH; ++place) {
        const int chunk = first_chunk + place;
        lily_operand<BITS> operand;
        vector.read(Rows::column(chunk, lane), operand);
        gate.accumulate(place, operand);
        up.accumulate(place, operand);
        if (chunk + DEPTH < CHUNKS) {
          gate.load(chunk + DEPTH, place, lane);
          up.load(chunk + DEPTH, place, lane);
        }
      }
    }
    gate.reduce(lane);
    up.reduce(lane);
    const f32 factor = vector.inverse_rms(lily_f32_from_bits(u32(EPS_BITS)));
    const int owned = first + Rows::owned_row(lane);
    LILY_UNROLL
    for (int r = 0; r < Rows::OWNED; ++r) {
      if (Rows::owns(lane) && owned + r >= row) {
        chosen[slot * M + owned + r] = lily_fast_silu(gate.sums[r] * factor) * (up.sums[r] * factor);
      }
    }
  }
};

// ---- body ----
using Op = ExpertGateUp<InT, NormT, ScaleT, LogitT, K, M, E, TOP_K, GROUP, BITS, EPS_BITS, ROWS, AHEAD, SIMDGROUPS>;
LILY_THREADGROUP_ARRAY(f32, vector, Op::Vector::FLOATS);
LILY_THREADGROUP_ARRAY(u32, ranking, Op::Ranking::WORDS);
Op op = {
    logits, chosen, {vector}, {ranking},
    thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup};
op.run(x, norm_weight, matrices, int(threadgroup_position_in_grid.x));
