// Matrices of affine-quantised weights times one vector.
//
//   y = W x                                                 W [N, K] is W0 to W3, one above the other
//   with HAS_NORM      y = W (x * norm_weight) / sqrt(mean(x^2) + eps)
//   with HAS_RESIDUAL  y = y + residual
//
//   x            [K]            InT
//   norm_weight  [K]            NormT   read only if HAS_NORM
//   residual     [N]            InT     read only if HAS_RESIDUAL
//   weight_i     [Ni, K*BITSi/32] u32   numbers from the low bits on; i = 0 to 3, absent where Ni = 0
//   scales_i     [Ni, K/GROUP]  ScaleT
//   biases_i     [Ni, K/GROUP]  ScaleT
//   parameters   [8]            i32     parameters[0]: the bits of eps
//   y            [N]            OutT    N = N0 + N1 + N2 + N3
//
// Who owns what: a threadgroup owns rows of one matrix. It puts x (times norm_weight) into threadgroup memory
// once; then each simdgroup goes through REPEAT blocks of 32 / LANES * ROWS rows, LANES lanes a row (32 unless K
// is small), each lane reading 16 bytes of every row in turn, see common/packed_rows.h.
//
// Limits: K a multiple of 32 and of GROUP; Ni = 0 or Ni >= ROWS; threadgroup memory of 5.5 * K bytes.
//
// Why this order: the first weights are requested before x is, so that their way from memory overlaps with all
// that is done to x. The factor of the norm does not depend on the row, so it is applied to the sums.
//
// The last block of a matrix is moved up so that it ends with the matrix; rows that it shares with the block
// before are computed twice and written once.

#include "common/packed_rows.h"

template <typename ScaleT>
struct QmvMatrix {
  LILY_DEVICE const u32* weights;
  LILY_DEVICE const ScaleT* scales;
  LILY_DEVICE const ScaleT* biases;
  int rows;
};

template <
    typename InT, typename OutT, typename ScaleT, typename NormT, typename ResidualT,
    int BITS, int K, int GROUP, bool HAS_NORM, bool HAS_RESIDUAL, int ROWS, int REPEAT, int AHEAD, int SIMDGROUPS>
LILY_INLINE void qmv_threadgroup(
    QmvMatrix<ScaleT> matrix,
    LILY_DEVICE const InT* x,
    LILY_DEVICE const NormT* norm_weight,
    LILY_DEVICE const ResidualT* residual,
    f32 eps,
    LILY_DEVICE OutT* y,
    LILY_THREADGROUP f32* memory,
    int block,  // of the threadgroup, in the matrix
    uint thread_index,
    uint simdgroup,
    uint lane) {
  using Rows = lily_packed_rows<ScaleT, BITS, GROUP, K, ROWS, AHEAD, 32>;
  enum : int { CHUNKS = Rows::CHUNKS, DEPTH = Rows::DEPTH, STEP = SIMDGROUPS * Rows::BLOCK_ROWS };
  lily_shared_vector<K, SIMDGROUPS> vector;
  vector.memory = memory;

  const int last = matrix.rows - ROWS;
  int row = block * (STEP * REPEAT) + int(simdgroup) * Rows::BLOCK_ROWS + Rows::row_in_block(lane);
  Rows rows;
  rows.start(matrix.weights, matrix.scales, matrix.biases, lily_min(row, last));
  rows.load_first(lane);
  vector.template fill<HAS_NORM>(x, norm_weight, thread_index, lane);
  lily_threadgroup_barrier();
  const f32 factor = HAS_NORM ? vector.inverse_rms(eps) : 1.0f;

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
          rows.start(matrix.weights, matrix.scales, matrix.biases, lily_min(row + STEP, last));
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

template <
    typename InT, typename OutT, typename ScaleT,
    int K, int GROUP, int N0, int N1, int N2, int N3, int BITS0, int BITS1, int BITS2, int BITS3,
    bool HAS_NORM, bool HAS_RESIDUAL, int ROWS, int REPEAT, int AHEAD, int SIMDGROUPS>
struct Qmv {
  template <int BITS>
  static LILY_INLINE int threadgroups(int rows) {
    using Rows = lily_packed_rows<ScaleT, BITS, GROUP, K, ROWS, AHEAD, 32>;
    enum : int { THREADGROUP_ROWS = Rows::BLOCK_ROWS * REPEAT * SIMDGROUPS };
    return (rows + THREADGROUP_ROWS - 1) / THREADGROUP_ROWS;
  }

  // Absent matrices come as pointers to another type.
  template <typename NormT, typename ResidualT, typename W1, typename S1, typename W2, typename S2, typename W3, typename S3>
  static LILY_INLINE void run(
      LILY_DEVICE const InT* x,
      LILY_DEVICE const NormT* norm_weight,
      LILY_DEVICE const ResidualT* residual,
      LILY_DEVICE const u32* weight_0,
      LILY_DEVICE const ScaleT* scales_0,
      LILY_DEVICE const ScaleT* biases_0,
      LILY_DEVICE const W1* weight_1,
      LILY_DEVICE const S1* scales_1,
      LILY_DEVICE const S1* biases_1,
      LILY_DEVICE const W2* weight_2,
      LILY_DEVICE const S2* scales_2,
      LILY_DEVICE const S2* biases_2,
      LILY_DEVICE const W3* weight_3,
      LILY_DEVICE const S3* scales_3,
      LILY_DEVICE const S3* biases_3,
      LILY_DEVICE const i32* parameters,
      LILY_DEVICE OutT* y,
      LILY_THREADGROUP f32* memory,
      int block,
      uint thread_index,
      uint simdgroup,
      uint lane) {
    QmvMatrix<ScaleT> matrix = {weight_0, scales_0, biases_0, N0};
    int bits = BITS0;
    int before = 0;  // rows of the matrices before this one
    const int blocks_0 = threadgroups<BITS0>(N0);
    const int blocks_1 = threadgroups<BITS1>(N1);
    const int blocks_2 = threadgroups<BITS2>(N2);
    if (N3 > 0 && block >= blocks_0 + blocks_1 + blocks_2) {
      matrix = {as_words(weight_3), as_scales(scales_3), as_scales(biases_3), N3};
      bits = BITS3;
      before = N0 + N1 + N2;
      block -= blocks_0 + blocks_1 + blocks_2;
    } else if (N2 > 0 && block >= blocks_0 + blocks_1) {
      matrix = {as_words(weight_2), as_scales(scales_2), as_scales(biases_2), N2};
      bits = BITS2;
      before = N0 + N1;
      block -= blocks_0 + blocks_1;
    } else if (N1 > 0 && block >= blocks_0) {
      matrix = {as_words(weight_1), as_scales(scales_1), as_scales(biases_1), N1};
      bits = BITS1;
      before = N0;
      block -= blocks_0;
    }
    const f32 eps = HAS_NORM ? lily_f32_from_bits(u32(parameters[0])) : 0.0f;
    residual += HAS_RESIDUAL ? before : 0;
    y += before;
    constexpr bool any_4 = BITS0 == 4 || BITS1 == 4 || BITS2 == 4 || BITS3 == 4;
    constexpr bool any_8 = BITS0 == 8 || BITS1 == 8 || BITS2 == 8 || BITS3 == 8;
    // bits is the same for a whole threadgroup, so its barrier is too.
    if (any_4 && (!any_8 || bits == 4)) {
      qmv_threadgroup<
          InT, OutT, ScaleT, NormT, ResidualT, any_4 ? 4 : 8, K, GROUP, HAS_NORM, HAS_RESIDUAL, ROWS, REPEAT, AHEAD, SIMDGROUPS>(
          matrix, x, norm_weight, residual, eps, y, memory, block, thread_index, simdgroup, lane);
    } else {
      qmv_threadgroup<
          InT, OutT, ScaleT, NormT, ResidualT, any_8 ? 8 : 4, K, GROUP, HAS_NORM, HAS_RESIDUAL, ROWS, REPEAT, AHEAD, SIMDGROUPS>(
          matrix, x, norm_weight, residual, eps, y, memory, block, thread_index, simdgroup, lane);
    }
  }

  template <typename W>
  static LILY_INLINE LILY_DEVICE const u32* as_words(LILY_DEVICE const W* weights) {
    return reinterpret_cast<LILY_DEVICE const u32*>(weights);
  }
  template <typename S>
  static LILY_INLINE LILY_DEVICE const ScaleT* as_scales(LILY_DEVICE const S* scales) {
    return reinterpret_cast<LILY_DEVICE const ScaleT*>(scales);
  }
};

// ---- body ----
LILY_THREADGROUP_ARRAY(f32, memory, (lily_shared_vector<K, SIMDGROUPS>::FLOATS));
Qmv<InT, OutT, ScaleT, K, GROUP, N0, N1, N2, N3, BITS0, BITS1, BITS2, BITS3, HAS_NORM, HAS_RESIDUAL, ROWS, REPEAT, AHEAD, SIMDGROUPS>::run(
    x, norm_weight, residual, weight_0, scales_0, biases_0, weight_1, scales_1, biases_1, weight_2, scales_2, biases_2,
    weight_3, scales_3, biases_3, parameters, y, memory, int(threadgroup_position_in_grid.x), thread_index_in_threadgroup,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
