// Routing, and the first half of the experts: gate and up projections with SwiGLU, of the chosen experts and of
// the shared expert.
//
//   n = x * norm_weight / sqrt(mean(x^2) + eps)
//   experts = the TOP_K experts with the largest logits, by index; weights = softmax over their logits
//   h_s = silu(gate_e n) * (up_e n)           e = experts[s]; last comes the shared expert
//
//   x             [K]              InT
//   norm_weight   [K]              NormT
//   logits        [E + 1]          LogitT  router, then the shared expert's gate
//   gate_*, up_*  [E, M, ...]      weights [K*BITS/32] u32, scales and biases [K/GROUP] ScaleT
//   shared_gate_*, shared_up_*  [MS, ...]  likewise, with SHARED_BITS
//   parameters    [8]              i32     parameters[0]: the bits of eps
//   h             [TOP_K * M + MS] f32     expert after expert
//   experts       [TOP_K + 1]      i32     ascending; E, the shared expert, last
//   weights       [TOP_K + 1]      f32     the shared expert's is the sigmoid of its gate
//
// Among equal logits the lower index is chosen. NaN ranks below everything, so that indices are always in range.
//
// Who owns what: a threadgroup owns rows of one expert; the shared expert's threadgroups come first. A simdgroup
// owns 32 / LANES * ROWS rows, of the gate and of the up projection, LANES lanes a row, see
// common/packed_rows.h. Every threadgroup that needs the choice makes it, in its first simdgroup, and the one
// with the first rows of the first expert also writes it.
//
// Limits: K a multiple of 32 and of GROUP; ROWS <= M and MS; TOP_K <= E and 32; threadgroup memory of
// 5.5 * K bytes.
//
// Why this order: choosing again in every threadgroup takes less time than a launch more. The shared expert's
// weights are requested before x, as they do not depend on the choice.

#include "common/packed_rows.h"
#include "common/route.h"

template <typename ScaleT>
struct GateUpMatrix {
  LILY_DEVICE const u32* weights;
  LILY_DEVICE const ScaleT* scales;
  LILY_DEVICE const ScaleT* biases;
};

template <
    typename InT, typename NormT, typename ScaleT, typename LogitT,
    int K, int M, int MS, int E, int TOP_K, int GROUP, int BITS, int SHARED_BITS, int ROWS, int AHEAD, int SIMDGROUPS>
struct ExpertGateUp {
  static_assert(ROWS <= M && ROWS <= MS, "a block of rows fits into an expert");
  enum : int { FLOATS = lily_shared_vector<K, SIMDGROUPS>::FLOATS };
  using Matrix = GateUpMatrix<ScaleT>;

  LILY_DEVICE const InT* x;
  LILY_DEVICE const NormT* norm_weight;
  LILY_DEVICE const LogitT* logits;
  LILY_DEVICE f32* h;
  LILY_DEVICE i32* experts;
  LILY_DEVICE f32* weights;
  f32 eps;
  LILY_THREADGROUP f32* memory;  // [FLOATS]
  LILY_THREADGROUP i32* chosen;  // [TOP_K]
  uint thread_index;
  uint simdgroup;
  uint lane;

  template <int ROW_BITS>
  static LILY_INLINE int threadgroups(int rows) {
    using Rows = lily_packed_rows<ScaleT, ROW_BITS, GROUP, K, ROWS, AHEAD, 32>;
    enum : int { THREADGROUP_ROWS = Rows::BLOCK_ROWS * SIMDGROUPS };
    return (rows + THREADGROUP_ROWS - 1) / THREADGROUP_ROWS;
  }

  LILY_INLINE void choose(bool writes) {
    lily_route<E, TOP_K>(logits, chosen, lane);
    if (writes) {
      lily_simdgroup_barrier();
      const int expert = chosen[lily_min(int(lane), TOP_K - 1)];
      const f32 weight = lily_routing_weight<TOP_K>(lily_to_f32(logits[expert]), lane);
      if (int(lane) < TOP_K) {
        experts[lane] = expert;
        weights[lane] = weight;
      }
      if (lane == 0) {
        experts[TOP_K] = E;
        weights[TOP_K] = 1.0f / (1.0f + lily_exp(-lily_to_f32(logits[E])));
      }
    }
  }

  // Pointer by pointer: of a choice between structs, compilers forget that its pointers are to device memory.
  static LILY_INLINE Matrix select(bool first, Matrix a, Matrix b) {
    return {first ? a.weights : b.weights, first ? a.scales : b.scales, first ? a.biases : b.biases};
  }

  // block: of the threadgroup, in its expert; slot: the expert's place in the choice, TOP_K for the shared one.
  template <int ROW_BITS>
  LILY_INLINE void run(Matrix gate_matrix, Matrix up_matrix, int slot, int block) {
    using Rows = lily_packed_rows<ScaleT, ROW_BITS, GROUP, K, ROWS, AHEAD, 32>;
    enum : int { CHUNKS = Rows::CHUNKS, DEPTH = Rows::DEPTH };
    lily_shared_vector<K, SIMDGROUPS> vector;
    vector.memory = memory;
    const bool is_shared = slot == TOP_K;
    const int rows = is_shared ? MS : M;
    // The last block is moved up to end with the expert; what it shares with the block before is written once.
    const int row = (block * SIMDGROUPS + int(simdgroup)) * Rows::BLOCK_ROWS + Rows::row_in_block(lane);
    const int first = lily_min(row, rows - ROWS);

    Rows gate;
    Rows up;
    if (is_shared) {
      gate.start(gate_matrix.weights, gate_matrix.scales, gate_matrix.biases, first);
      up.start(up_matrix.weights, up_matrix.scales, up_matrix.biases, first);
      gate.load_first(lane);
      up.load_first(lane);
    }
    vector.template fill<true>(x, norm_weight, thread_index, lane);
    if (!is_shared && simdgroup == 0) {
      choose(slot == 0 && block == 0);
    }
    lily_threadgroup_barrier();
    if (!is_shared) {
      const i64 expert_row = i64(chosen[slot]) * M + first;
      gate.start(gate_matrix.weights, gate_matrix.scales, gate_matrix.biases, expert_row);
      up.start(up_matrix.weights, up_matrix.scales, up_matrix.biases, expert_row);
      gate.load_first(lane);
      up.load_first(lane);
    }
    const f32 factor = vector.inverse_rms(eps);

    gate.clear();
    up.clear();
    LILY_UNROLL
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      lily_operand<ROW_BITS> operand;
      vector.read(Rows::column(chunk, lane), operand);
      gate.accumulate(chunk, operand);
      up.accumulate(chunk, operand);
      if (chunk + DEPTH < CHUNKS) {
        gate.load(chunk + DEPTH, lane);
        up.load(chunk + DEPTH, lane);
      }
    }
    gate.reduce(lane);
    up.reduce(lane);
    const int owned = first + Rows::owned_row(lane);
    LILY_UNROLL
    for (int r = 0; r < Rows::OWNED; ++r) {
      const f32 g = gate.sums[r] * factor;
      const f32 u = up.sums[r] * factor;
      if (Rows::owns(lane) && owned + r >= row) {
        h[slot * M + owned + r] = g / (1.0f + lily_exp(-g)) * u;
      }
    }
  }

  LILY_INLINE void run_all(Matrix gate, Matrix up, Matrix shared_gate, Matrix shared_up, int block) {
    const int shared_blocks = threadgroups<SHARED_BITS>(MS);
    const int blocks = threadgroups<BITS>(M);
    const bool is_shared = block < shared_blocks;
    const int slot = is_shared ? int(TOP_K) : (block - shared_blocks) / blocks;
    block = is_shared ? block : (block - shared_blocks) % blocks;
    // The same for a whole threadgroup, so its barrier is too. One copy of the code if the bits agree.
    if constexpr (BITS == SHARED_BITS) {
      run<BITS>(select(is_shared, shared_gate, gate), select(is_shared, shared_up, up), slot, block);
    } else if (is_shared) {
      run<SHARED_BITS>(shared_gate, shared_up, slot, block);
    } else {
      run<BITS>(gate, up, slot, block);
    }
  }
};

// ---- body ----
using Op = ExpertGateUp<InT, NormT, ScaleT, LogitT, K, M, MS, E, TOP_K, GROUP, BITS, SHARED_BITS, ROWS, AHEAD, SIMDGROUPS>;
LILY_THREADGROUP_ARRAY(f32, memory, Op::FLOATS);
LILY_THREADGROUP_ARRAY(i32, chosen, TOP_K);
Op op = {
    x, norm_weight, logits, h, experts, weights, lily_f32_from_bits(u32(parameters[0])), memory, chosen,
    thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup};
op.run_all(
    {gate_weight, gate_scales, gate_biases}, {up_weight, up_scales, up_biases},
    {shared_gate_weight, shared_gate_scales, shared_gate_biases},
    {shared_up_weight, shared_up_scales, shared_up_biases}, int(threadgroup_position_in_grid.x));
