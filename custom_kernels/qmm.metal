// Many vectors times quantised matrices: the products of prefill, up to four matrices in one launch.
//
//   y = x [W_0; W_1; W_2; W_3]^T, with a residual  residual + ...
//
//   x             [T, K]           InT
//   residual      [T, N]           InT     N = N0 + N1 + N2 + N3
//   weight_i      [Ni, K*BITSi/32] u32     scales_i, biases_i [Ni, K/GROUP] ScaleT; Ni = 0: absent
//   parameters    [8]              i32     parameters[0]: T
//   y             [T, N]           OutT
//
// Who owns what: a threadgroup owns ROWS rows of y and SIMDGROUPS * COLS columns of one matrix, a simdgroup COLS
// of them. See common/tile_product.h.
//
// Limits: K a multiple of STEP and of GROUP. Sums are fp32 and rounded once, after the residual is added.
//
// Why this order: threadgroups with the same columns follow each other, so that weights come from the cache.

#include "common/tile_product.h"

template <
    typename InT, typename OutT, typename ScaleT, int K, int GROUP, int N0, int N1, int N2, int N3, int BITS0, int BITS1,
    int BITS2, int BITS3, bool HAS_RESIDUAL, int ROWS, int COLS, int STEP, int SIMDGROUPS>
struct Qmm {
  using Matrix = lily_packed_rows_at<ScaleT>;
  enum : int {
    N = N0 + N1 + N2 + N3,
    COLS_OF_THREADGROUP = COLS * SIMDGROUPS,
    // No matrix has fewer columns than a simdgroup.
    ALL_WIDE = N0 >= COLS && (N1 == 0 || N1 >= COLS) && (N2 == 0 || N2 >= COLS) && (N3 == 0 || N3 >= COLS),
    // Pairs of columns stay in one matrix, and at multiples of two elements.
    IN_PAIRS = N0 % 2 == 0 && N1 % 2 == 0 && N2 % 2 == 0 && N3 % 2 == 0
  };

  LILY_DEVICE const InT* x;
  LILY_DEVICE const InT* residual;
  LILY_DEVICE OutT* y;
  LILY_THREADGROUP InT* memory;
  int T;
  uint thread_index;
  uint simdgroup;
  uint lane;

  static LILY_INLINE int column_blocks(int n) {
    return (n + COLS_OF_THREADGROUP - 1) / COLS_OF_THREADGROUP;
  }

  // column_block: in the matrix of `matrix_rows` rows, whose first column of y is first_column.
  template <int BITS>
  LILY_INLINE void run(Matrix matrix, int matrix_rows, int first_column, int row_block, int column_block) {
    using Product = lily_tile_product<InT, ScaleT, 1, ROWS, COLS, K, BITS, GROUP, STEP, SIMDGROUPS>;
    const int first_row = row_block * ROWS;
    const int rows = lily_min(T - first_row, ROWS);
    // The last columns are moved up to end with the matrix; what they share with those before is written once. In a
    // matrix that has fewer than COLS, those that it lacks repeat its last and are not written.
    const int owned = (column_block * SIMDGROUPS + int(simdgroup)) * COLS;
    const int column = ALL_WIDE ? lily_min(owned, matrix_rows - COLS) : owned;
    const int first = lily_min(column, matrix_rows - 1);
    const Matrix matrices[1] = {lily_rows_from<K, BITS, GROUP>(matrix, first)};

    Product product;
    product.memory = memory;
    product.thread_index = thread_index;
    product.lane = lane;
    u32 starts[Product::LOADS];
    LILY_UNROLL
    for (int i = 0; i < Product::LOADS; ++i) {
      starts[i] = u32(first_row + lily_min(product.row_of_load(i), rows - 1)) * u32(K / 8);
    }
    product.run(x, starts, matrices, ALL_WIDE ? COLS : matrix_rows - first);

    LILY_UNROLL
    for (int i = 0; i < Product::Tile::ELEMENTS; i += 2) {
      const int row = Product::Tile::row(i, lane);
      const int col = column + Product::Tile::col(i, lane);
      const i64 target = i64(first_row + row) * N + first_column + col;
      if constexpr (IN_PAIRS) {
        if (row < rows && col >= owned && col < matrix_rows) {
          f32 values[2] = {product.tiles[0].values[i], product.tiles[0].values[i + 1]};
          if constexpr (HAS_RESIDUAL) {
            f32 before[2];
            lily_unpack(lily_load<2>(residual + target), before);
            values[0] = before[0] + values[0];
            values[1] = before[1] + values[1];
          }
          lily_store(y + target, lily_pack<OutT, 2>(values));
        }
      } else {
        LILY_UNROLL
        for (int j = 0; j < 2; ++j) {
          if (row < rows && col + j >= owned && col + j < matrix_rows) {
            f32 value = product.tiles[0].values[i + j];
            if constexpr (HAS_RESIDUAL) {
              value = lily_to_f32(residual[target + j]) + value;
            }
            y[target + j] = lily_from_f32<OutT>(value);
          }
        }
      }
    }
  }

  LILY_INLINE void run_all(Matrix m0, Matrix m1, Matrix m2, Matrix m3, int threadgroup_index) {
    const int row_blocks = (T + ROWS - 1) / ROWS;
    const int row_block = threadgroup_index % row_blocks;
    int column_block = threadgroup_index / row_blocks;
    const int blocks_0 = column_blocks(N0);
    const int blocks_1 = column_blocks(N1);
    const int blocks_2 = column_blocks(N2);
    // Pointer by pointer: of a choice between structs, compilers forget that its pointers are to device memory.
    LILY_DEVICE const u32* words = m0.words;
    LILY_DEVICE const ScaleT* scales = m0.scales;
    LILY_DEVICE const ScaleT* biases = m0.biases;
    int matrix_rows = N0;
    int bits = BITS0;
    int before = 0;  // columns of y before this matrix's
    if (N3 > 0 && column_block >= blocks_0 + blocks_1 + blocks_2) {
      words = m3.words;
      scales = m3.scales;
      biases = m3.biases;
      matrix_rows = N3;
      bits = BITS3;
      before = N0 + N1 + N2;
      column_block -= blocks_0 + blocks_1 + blocks_2;
    } else if (N2 > 0 && column_block >= blocks_0 + blocks_1) {
      words = m2.words;
      scales = m2.scales;
      biases = m2.biases;
      matrix_rows = N2;
      bits = BITS2;
      before = N0 + N1;
      column_block -= blocks_0 + blocks_1;
    } else if (N1 > 0 && column_block >= blocks_0) {
      words = m1.words;
      scales = m1.scales;
      biases = m1.biases;
      matrix_rows = N1;
      bits = BITS1;
      before = N0;
      column_block -= blocks_0;
    }
    constexpr bool any_4 = BITS0 == 4 || BITS1 == 4 || BITS2 == 4 || BITS3 == 4;
    constexpr bool any_8 = BITS0 == 8 || BITS1 == 8 || BITS2 == 8 || BITS3 == 8;
    // The same for a whole threadgroup, so its barriers are too. One copy of the code if the bits agree.
    if (any_4 && (!any_8 || bits == 4)) {
      run<any_4 ? 4 : 8>({words, scales, biases}, matrix_rows, before, row_block, column_block);
    } else {
      run<any_8 ? 8 : 4>({words, scales, biases}, matrix_rows, before, row_block, column_block);
    }
  }
};

// ---- body ----
using Op = Qmm<InT, OutT, ScaleT, K, GROUP, N0, N1, N2, N3, BITS0, BITS1, BITS2, BITS3, HAS_RESIDUAL, ROWS, COLS, STEP, SIMDGROUPS>;
using Memory = lily_product_buffers<InT, ROWS, STEP>;
LILY_THREADGROUP_ARRAY(InT, memory, Memory::TOTAL);
// Absent arrays come as pointers to another type.
Op op = {
    x, reinterpret_cast<LILY_DEVICE const InT*>(residual), y, memory, parameters[0], thread_index_in_threadgroup,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup};
op.run_all(
    {weight_0, scales_0, biases_0},
    {reinterpret_cast<LILY_DEVICE const u32*>(weight_1), reinterpret_cast<LILY_DEVICE const ScaleT*>(scales_1),
     reinterpret_cast<LILY_DEVICE const ScaleT*>(biases_1)},
    {reinterpret_cast<LILY_DEVICE const u32*>(weight_2), reinterpret_cast<LILY_DEVICE const ScaleT*>(scales_2),
     reinterpret_cast<LILY_DEVICE const ScaleT*>(biases_2)},
    {reinterpret_cast<LILY_DEVICE const u32*>(weight_3), reinterpret_cast<LILY_DEVICE const ScaleT*>(scales_3),
     reinterpret_cast<LILY_DEVICE const ScaleT*>(biases_3)},
    int(threadgroup_position_in_grid.x));
