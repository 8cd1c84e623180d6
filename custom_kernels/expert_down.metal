// The second half of the experts: down projections of the chosen experts and of the shared expert, weighted and
// summed, with the residual.
//
//   y = residual + sum over s of weights[s] * (down_e h_s)      e = experts[s]; last comes the shared expert
//
//   chosen      [(TOP_K + 1) (M + 2)] f32   h, expert after expert; experts, as numbers; weights
//   residual    [N]          InT
//   matrices    [*]          u32     weights [E + 1, N, M * BITS / 32], the shared expert's last; then scales and biases
//                                  [E + 1, N, M / GROUP] ScaleT, see common/packed_rows.h
//   y           [N]          InT
//
// Who owns what: a threadgroup owns ROWS rows of y, and each of its TOP_K + 1 simdgroups one expert's part of
// them. The simdgroup puts h_s, a chunk of at most 512 values at a time, into threadgroup memory of its own,
// from where each lane keeps its part in registers for all rows; LANES lanes share a row, see
// common/packed_rows.h. Then the first threads sum the parts, expert after expert in the order given, and last the
// residual.
//
// Limits: M a multiple of 32 and of GROUP; N a multiple of ROWS; ROWS a multiple of the rows that a simdgroup reads
// side by side; TOP_K <= 31.
//
// Why this order: h is requested before the weights, behind which it would wait, and while the expert's index comes.

#include "common/packed_rows.h"

template <typename InT, typename ScaleT, int N, int M, int E, int TOP_K, int GROUP, int BITS, int ROWS, int AHEAD>
struct ExpertDown {
  static_assert(N % ROWS == 0, "N is a multiple of ROWS");
  enum : int {
    MAX_CHUNK = 512,
    MAX_LANES = MAX_CHUNK * BITS / 128 < 32 ? MAX_CHUNK * BITS / 128 : 32,
    SIDE_BY_SIDE = 32 / int(lily_packed_rows<ScaleT, BITS, GROUP, M, 1, AHEAD, MAX_LANES>::LANES)
  };
  static_assert(ROWS % SIDE_BY_SIDE == 0, "ROWS is a multiple of the rows read side by side");
  using Rows = lily_packed_rows<ScaleT, BITS, GROUP, M, ROWS / SIDE_BY_SIDE, AHEAD, MAX_LANES>;
  using Vector = lily_shared_vector<Rows::CHUNK, 1>;
  enum : int {
    CHUNKS = Rows::CHUNKS,
    DEPTH = Rows::DEPTH,
    EXPERTS_AT = (TOP_K + 1) * M,
    WEIGHTS_AT = EXPERTS_AT + TOP_K + 1,
    FLOATS = (TOP_K + 1) * Vector::FLOATS,
    PARTS = (TOP_K + 1) * ROWS
  };

  LILY_THREADGROUP f32* memory;  // [FLOATS]
  LILY_THREADGROUP f32* parts;   // [TOP_K + 1, ROWS]
  uint thread_index;
  int slot;  // the simdgroup's expert, by its place in the choice
  uint lane;

  LILY_INLINE void run(
      LILY_DEVICE const f32* chosen,
      LILY_DEVICE const InT* residual,
      LILY_DEVICE const u32* matrices,
      LILY_DEVICE InT* y,
      int block) {
    const int row = block * ROWS;
    const int expert = int(chosen[EXPERTS_AT + slot]);
    const f32 expert_weight = chosen[WEIGHTS_AT + slot];
    f32 before = 0.0f;
    if (int(thread_index) < ROWS) {
      before = lily_to_f32(residual[row + int(thread_index)]);
    }
    Vector vector;
    vector.memory = memory + slot * Vector::FLOATS;
    vector.template fill<false>(chosen + slot * M, chosen, lane, lane);
    Rows rows;
    constexpr i64 ALL_ROWS = i64(E + 1) * N;
    const auto joined = lily_packed_matrix<ScaleT>::at(matrices, ALL_ROWS * (M * BITS / 32), ALL_ROWS * (M / GROUP));
    rows.start(joined.weight, joined.scales, joined.biases, i64(expert) * N + row + Rows::row_in_block(lane));
    rows.load_first(lane);
    rows.clear();
    LILY_NO_UNROLL
    for (int first_chunk = 0; first_chunk < CHUNKS; first_chunk += DEPTH) {
      LILY_UNROLL
      for (int place = 0; place < DEPTH; ++place) {
        const int chunk = first_chunk + place;
        lily_simdgroup_barrier();
        lily_operand<BITS> operand;
        vector.read(Rows::column(0, lane), operand);
        rows.accumulate(place, operand);
        if (chunk + DEPTH < CHUNKS) {
          rows.load(chunk + DEPTH, place, lane);
        }
        if (chunk + 1 < CHUNKS) {
          lily_simdgroup_barrier();
          vector.template fill<false>(chosen + slot * M + (chunk + 1) * Rows::CHUNK, chosen, lane, lane);
        }
      }
    }
    rows.reduce(lane);
    if (Rows::owns(lane)) {
      LILY_UNROLL
      for (int r = 0; r < Rows::OWNED; ++r) {
        parts[slot * ROWS + Rows::row_in_block(lane) + Rows::owned_row(lane) + r] = expert_weight * rows.sums[r];
      }
    }
    lily_threadgroup_barrier();
    if (int(thread_index) < ROWS) {
      f32 sum = parts[thread_index];
      LILY_UNROLL
      for (int s = 1; s <= TOP_K; ++s) {
        sum += parts[s * ROWS + int(thread_index)];
      }
      y[row + int(thread_index)] = lily_from_f32<InT>(sum + before);
    }
  }
};

// ---- body ----
using Op = ExpertDown<InT, ScaleT, N, M, E, TOP_K, GROUP, BITS, ROWS, AHEAD>;
LILY_THREADGROUP_ARRAY(f32, memory, Op::FLOATS);
LILY_THREADGROUP_ARRAY(f32, parts, Op::PARTS);
Op op = {
    memory, parts, thread_index_in_threadgroup, int(simdgroup_index_in_threadgroup), thread_index_in_simdgroup};
op.run(chosen, residual, matrices, y, int(threadgroup_position_in_grid.x));
