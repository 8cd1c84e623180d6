// The second half of the experts of many tokens: down projections, rows grouped by expert, results by token and slot.
//
//   y[rows[r]] = down_e h[r]                   r: grouped row, of expert e
//
//   h             [R, M]           InT
//   rows          [R]              i32     t * (TOP_K + 1) + slot of each grouped row: a permutation
//   blocks        [B, 4]           i32     expert, first grouped row, rows (1 to ROWS), 0; used ones first
//   count         [8]              i32     count[0]: blocks used
//   down_*        [E, H, ...]      weights [M*BITS/32] u32, scales and biases [M/GROUP] ScaleT
//   shared_*      [H, ...]         likewise: the shared expert, which blocks call expert E
//   y             [R, H]           InT     not weighted
//
// Who owns what: a threadgroup owns a block of rows and SIMDGROUPS * COLS columns of y, a simdgroup COLS of them. Each
// row of y is one grouped row's, so nobody adds. See common/tile_product.h.
//
// Limits: M a multiple of STEP and of GROUP; H of 16; COLS <= H. Sums are fp32; y is rounded once.
//
// Why this order: as in expert_gemm_gate_up.metal.

#include "common/tile_product.h"

template <typename InT, typename ScaleT, int M, int H, int GROUP, int BITS, int COLS, int STEP, int SIMDGROUPS>
struct ExpertGemmDown {
  using Matrix = lily_packed_rows_at<ScaleT>;
  enum : int { COLUMN_BLOCKS = (H + COLS * SIMDGROUPS - 1) / (COLS * SIMDGROUPS) };

  LILY_DEVICE const InT* h;
  LILY_DEVICE const i32* rows;  // of the block
  LILY_DEVICE InT* y;
  LILY_THREADGROUP InT* memory;
  int first_row;  // of the block
  int block_rows;
  int owned;   // the simdgroup's first column, unless that is too close to H
  int column;  // its first column
  Matrix down;
  u32 thread_index;
  u32 lane;

  template <int USED>
  LILY_INLINE void run() const {
    using Product = lily_tile_product<InT, ScaleT, 1, USED, COLS, M, BITS, GROUP, STEP, SIMDGROUPS>;
    const Matrix matrices[1] = {down};
    Product product;
    product.memory = memory;
    product.thread_index = thread_index;
    product.lane = lane;
    u32 starts[Product::LOADS];
    LILY_UNROLL
    for (int i = 0; i < Product::LOADS; ++i) {
      starts[i] = u32(first_row + lily_min(product.row_of_load(i), block_rows - 1)) * u32(M / 8);
    }
    product.run(h, starts, matrices, COLS);

    LILY_UNROLL
    for (int i = 0; i < Product::Tile::ELEMENTS; i += 2) {
      const int tile_row = Product::Tile::row(i, lane);
      const int tile_col = column + Product::Tile::col(i, lane);
      if (tile_row < block_rows && tile_col >= owned) {
        lily_store(y + i64(rows[tile_row]) * H + tile_col, lily_pack<InT, 2>(product.tiles[0].values + i));
      }
    }
  }
};

// ---- body ----
using Op = ExpertGemmDown<InT, ScaleT, M, H, GROUP, BITS, COLS, STEP, SIMDGROUPS>;
using Matrix = lily_packed_rows_at<ScaleT>;
using Memory = lily_product_buffers<InT, ROWS, STEP>;
LILY_THREADGROUP_ARRAY(InT, memory, Memory::TOTAL);
const int block = int(threadgroup_position_in_grid.x) / int(Op::COLUMN_BLOCKS);
if (block < count[0]) {
  const int expert = blocks[block * 4];
  const int first_row = blocks[block * 4 + 1];
  const int block_rows = blocks[block * 4 + 2];
  const bool is_shared = expert == E;
  // The last columns are moved up to end with H; what they share with those before is written once.
  const int column_block = int(threadgroup_position_in_grid.x) % int(Op::COLUMN_BLOCKS);
  const int owned = (column_block * SIMDGROUPS + int(simdgroup_index_in_threadgroup)) * COLS;
  const int column = lily_min(owned, H - COLS);
  const Matrix down = {
      is_shared ? shared_weight : down_weight, is_shared ? shared_scales : down_scales,
      is_shared ? shared_biases : down_biases};
  const i64 row = is_shared ? i64(column) : i64(expert) * H + column;
  const Op op = {
      h, rows + first_row, y, memory, first_row, block_rows, owned, column,
      lily_rows_from<M, BITS, GROUP>(down, row), thread_index_in_threadgroup, thread_index_in_simdgroup};
  lily_for_rows<ROWS>(op, block_rows);
}
