// The second half of the experts: down projections of the chosen experts and of the shared expert, weighted and
// summed, with the residual.
//
//   y = residual + sum over s of weights[s] * (down_e h_s)      e = experts[s]; last comes the shared expert
//
//   h           [TOP_K * M + MS] f32    expert after expert
//   experts     [TOP_K + 1]      i32    the last is not read
//   weights     [TOP_K + 1]      f32
//   residual    [N]              InT
//   down_*      [E, N, ...]      weights [M*BITS/32] u32, scales and biases [M/GROUP] ScaleT
//   shared_*    [N, ...]         weights [MS*SHARED_BITS/32], likewise
//   y           [N]              InT
//
// Who owns what: a threadgroup owns ROWS rows of y, and each of its TOP_K + 1 simdgroups one expert's part of
// them. The simdgroup puts h_s, a chunk of at most 512 values at a time, into threadgroup memory of its own,
// from where each lane keeps its part in registers for all rows; LANES lanes share a row, see
// common/packed_rows.h. Then the first threads sum the parts, expert after expert in the order given, the shared
// expert, and last the residual.
//
// Limits: M and MS multiples of 32 and of GROUP; N a multiple of ROWS; ROWS a multiple of the rows that a
// simdgroup reads side by side; TOP_K <= 31.

#include "common/packed_rows.h"

template <
    typename InT, typename ScaleT,
    int N, int M, int MS, int TOP_K, int GROUP, int BITS, int SHARED_BITS, int ROWS, int AHEAD>
struct ExpertDown {
  static_assert(N % ROWS == 0, "N is a multiple of ROWS");
  enum : int {
    MAX_CHUNK = 512,
    CHUNK_FLOATS = lily_shared_vector<MAX_CHUNK, 1>::FLOATS,
    FLOATS = (TOP_K + 1) * CHUNK_FLOATS,
    PARTS = (TOP_K + 1) * ROWS
  };

  struct Matrix {
    LILY_DEVICE const u32* weights;
    LILY_DEVICE const ScaleT* scales;
    LILY_DEVICE const ScaleT* biases;
  };

  LILY_DEVICE const f32* h;
  LILY_DEVICE const f32* weights;
  LILY_THREADGROUP f32* memory;  // [FLOATS]
  LILY_THREADGROUP f32* parts;   // [TOP_K + 1, ROWS]
  int slot;                      // the simdgroup's expert, by its place in the choice
  uint lane;

  // The simdgroup's part of the threadgroup's rows, which start at `row` of the matrix.
  template <int ROW_BITS, int WIDTH>
  LILY_INLINE void run(Matrix matrix, i64 row) {
    enum : int { MAX_LANES = MAX_CHUNK * ROW_BITS / 128 < 32 ? MAX_CHUNK * ROW_BITS / 128 : 32 };
    using Shape = lily_packed_rows<ScaleT, ROW_BITS, GROUP, WIDTH, 1, AHEAD, MAX_LANES>;
    enum : int { SLOTS = 32 / int(Shape::LANES) };
    static_assert(ROWS % SLOTS == 0, "ROWS is a multiple of the rows read side by side");
    using Rows = lily_packed_rows<ScaleT, ROW_BITS, GROUP, WIDTH, ROWS / SLOTS, AHEAD, MAX_LANES>;
    enum : int { CHUNK = Rows::CHUNK, CHUNKS = Rows::CHUNKS, DEPTH = Rows::DEPTH };
    lily_shared_vector<CHUNK, 1> vector;
    vector.memory = memory + slot * CHUNK_FLOATS;

    Rows rows;
    rows.start(matrix.weights, matrix.scales, matrix.biases, row + Rows::row_in_block(lane));
    rows.load_first(lane);
    rows.clear();
    LILY_UNROLL
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      if (chunk > 0) {
        lily_simdgroup_barrier();
      }
      vector.template fill<false>(h + slot * M + chunk * CHUNK, h, lane, lane);
      lily_simdgroup_barrier();
      lily_operand<ROW_BITS> operand;
      vector.read(Rows::column(0, lane), operand);
      rows.accumulate(chunk, operand);
      if (chunk + DEPTH < CHUNKS) {
        rows.load(chunk + DEPTH, lane);
      }
    }
    const f32 weight = weights[slot];
    rows.reduce(lane);
    if (Rows::owns(lane)) {
      LILY_UNROLL
      for (int r = 0; r < Rows::OWNED; ++r) {
        parts[slot * ROWS + Rows::row_in_block(lane) + Rows::owned_row(lane) + r] = weight * rows.sums[r];
      }
    }
  }
  LILY_INLINE void run_all(
      Matrix down,
      Matrix shared,
      LILY_DEVICE const i32* experts,
      LILY_DEVICE const InT* residual,
      LILY_DEVICE InT* y,
      int block,
      uint thread_index) {
    const int row = block * ROWS;
    f32 before = 0.0f;
    if (int(thread_index) < ROWS) {
      before = lily_to_f32(residual[row + int(thread_index)]);
    }
    const bool is_shared = slot == TOP_K;
    const i64 first = (is_shared ? i64(0) : i64(experts[slot]) * N) + row;
    if constexpr (BITS == SHARED_BITS && M == MS) {  // one copy of the code
      // Pointer by pointer: of a choice between structs, compilers forget that its pointers are to device memory.
      run<BITS, M>(
          {is_shared ? shared.weights : down.weights, is_shared ? shared.scales : down.scales,
           is_shared ? shared.biases : down.biases},
          first);
    } else if (is_shared) {
      run<SHARED_BITS, MS>(shared, first);
    } else {
      run<BITS, M>(down, first);
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
using Op = ExpertDown<InT, ScaleT, N, M, MS, TOP_K, GROUP, BITS, SHARED_BITS, ROWS, AHEAD>;
LILY_THREADGROUP_ARRAY(f32, memory, Op::FLOATS);
LILY_THREADGROUP_ARRAY(f32, parts, Op::PARTS);
Op op = {h, weights, memory, parts, int(simdgroup_index_in_threadgroup), thread_index_in_simdgroup};
op.run_all(
    {down_weight, down_scales, down_biases}, {shared_weight, shared_scales, shared_biases}, experts, residual, y,
    int(threadgroup_position_in_grid.x), thread_index_in_threadgroup);
