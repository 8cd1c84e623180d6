// The first half of the experts of many tokens: gate and up projections with SwiGLU, rows grouped by expert.
//
//   h[r] = silu(gate_e x[t]) * (up_e x[t])     r: grouped row, of expert e; t: its token
//
//   x             [T, K]           InT
//   rows          [R]              i32     t * (TOP_K + 1) + slot of each grouped row
//   blocks        [B, 4]           i32     expert, first grouped row, rows (1 to ROWS), 0; used ones first
//   count         [8]              i32     count[0]: blocks used
//   gate_*, up_*  [E, M, ...]      weights [K*BITS/32] u32, scales and biases [K/GROUP] ScaleT
//   shared_gate_*, shared_up_*     [M, ...] likewise: the shared expert, which blocks call expert E
//   h             [R, M]           InT
//
// Who owns what: a threadgroup owns a block of rows and SIMDGROUPS * COLS columns of h, a simdgroup COLS of them, with
// the gate's and the up projection's columns in the same lanes. See common/tile_product.h.
//
// Limits: K a multiple of STEP and of GROUP; M of 16; COLS <= M. Sums are fp32; h is rounded once.
//
// Why this order: the threadgroups of one block follow each other, so its rows of x are read from memory once; an
// expert's weights are read once for every block it has.

#include "common/tile_product.h"

template <
    typename InT, typename ScaleT, int K, int M, int TOP_K, int GROUP, int BITS, int COLS, int STEP, int SIMDGROUPS>
struct ExpertGemmGateUp {
  using Matrix = lily_packed_rows_at<ScaleT>;
  enum : int { COLUMN_BLOCKS = (M + COLS * SIMDGROUPS - 1) / (COLS * SIMDGROUPS) };

  LILY_DEVICE const InT* x;
  LILY_DEVICE const i32* rows;  // of the block
  LILY_DEVICE InT* h;           // of the block
  LILY_THREADGROUP InT* memory;
  int block_rows;
  int owned;   // the simdgroup's first column, unless that is too close to M
  int column;  // its first column
  Matrix gate;
  Matrix up;
  u32 thread_index;
  u32 lane;

  template <int USED>
  LILY_INLINE void run() const {
    using Product = lily_tile_product<InT, ScaleT, 2, USED, COLS, K, BITS, GROUP, STEP, SIMDGROUPS>;
    const Matrix matrices[2] = {gate, up};
    Product product;
    product.memory = memory;
    product.thread_index = thread_index;
    product.lane = lane;
    u32 starts[Product::LOADS];
    LILY_UNROLL
    for (int i = 0; i < Product::LOADS; ++i) {
      const int own = lily_min(product.row_of_load(i), block_rows - 1);
      starts[i] = u32(rows[own] / (TOP_K + 1)) * u32(K / 8);
    }
    product.run(x, starts, matrices, COLS);

    LILY_UNROLL
    for (int i = 0; i < Product::Tile::ELEMENTS; i += 2) {
      const int tile_row = Product::Tile::row(i, lane);
      const int tile_col = column + Product::Tile::col(i, lane);
      if (tile_row < block_rows && tile_col >= owned) {
        f32 values[2];
        LILY_UNROLL
        for (int j = 0; j < 2; ++j) {
          const f32 g = product.tiles[0].values[i + j];
          values[j] = g / (1.0f + lily_exp(-g)) * product.tiles[1].values[i + j];
        }
        lily_store(h + tile_row * M + tile_col, lily_pack<InT, 2>(values));
      }
    }
  }

  static LILY_INLINE Matrix select(bool first, Matrix a, Matrix b) {
    return {first ? a.words : b.words, first ? a.scales : b.scales, first ? a.biases : b.biases};
  }
};

// ---- body ----
using Op = ExpertGemmGateUp<InT, ScaleT, K, M, TOP_K, GROUP, BITS, COLS, STEP, SIMDGROUPS>;
using Matrix = lily_packed_rows_at<ScaleT>;
using Memory = lily_product_buffers<InT, ROWS, STEP>;
LILY_THREADGROUP_ARRAY(InT, memory, Memory::TOTAL);
const int block = int(threadgroup_position_in_grid.x) / int(Op::COLUMN_BLOCKS);
if (block < count[0]) {
  const int expert = blocks[block * 4];
  const int first_row = blocks[block * 4 + 1];
  const int block_rows = blocks[block * 4 + 2];
  const bool is_shared = expert == E;
  // The last columns are moved up to end with M; what they share with those before is written once.
  const int column_block = int(threadgroup_position_in_grid.x) % int(Op::COLUMN_BLOCKS);
  const int owned = (column_block * SIMDGROUPS + int(simdgroup_index_in_threadgroup)) * COLS;
  const int column = lily_min(owned, M - COLS);
  const i64 row = is_shared ? i64(column) : i64(expert) * M + column;
  const Matrix gate = Op::select(
      is_shared, {shared_gate_weight, shared_gate_scales, shared_gate_biases}, {gate_weight, gate_scales, gate_biases});
  const Matrix up = Op::select(
      is_shared, {shared_up_weight, shared_up_scales, shared_up_biases}, {up_weight, up_scales, up_biases});
  const Op op = {
      x, rows + first_row, h + i64(first_row) * M, memory, block_rows, owned, column,
      lily_rows_from<K, BITS, GROUP>(gate, row), lily_rows_from<K, BITS, GROUP>(up, row),
      thread_index_in_threadgroup, thread_index_in_simdgroup};
  lily_for_rows<ROWS>(op, block_rows);
}
