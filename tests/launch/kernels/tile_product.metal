// C = A B^T (B [N, K]) or A B (B [K, N]) by tile products, for the tests of the prelude.
//
//   a [M, K] T, b [N, K] or [K, N] T, c [M, N] f32
//
// One threadgroup. Simdgroup s owns columns [s, s + 1) * N / SIMDGROUPS of C; K is taken in two halves, so
// that the second product adds to the first.

template <typename T, int M, int N, int K, bool B_IS_KN, int SIMDGROUPS>
LILY_INLINE void tile_product(
    LILY_DEVICE const T* a,
    LILY_DEVICE const T* b,
    LILY_DEVICE f32* c,
    LILY_THREADGROUP T* a_tile,
    LILY_THREADGROUP T* b_tile,
    uint thread_index,
    uint simdgroup,
    uint lane) {
  constexpr int PAD = 16 / int(sizeof(T));  // an odd multiple of 16 bytes from row to row
  constexpr int HALF_K = K / 2;
  constexpr int COLS = N / SIMDGROUPS;
  constexpr int A_STRIDE = HALF_K + PAD;
  constexpr int B_ROWS = B_IS_KN ? HALF_K : N;
  constexpr int B_COLS = B_IS_KN ? N : HALF_K;
  constexpr int B_STRIDE = B_COLS + PAD;
  constexpr int B_DEVICE_STRIDE = B_IS_KN ? N : K;

  lily_tile<T, M, COLS> tile;
  tile.zero();
  for (int k = 0; k < K; k += HALF_K) {
    for (int i = int(thread_index); i < M * HALF_K; i += 32 * SIMDGROUPS) {
      a_tile[i / HALF_K * A_STRIDE + i % HALF_K] = a[i / HALF_K * K + k + i % HALF_K];
    }
    for (int i = int(thread_index); i < B_ROWS * B_COLS; i += 32 * SIMDGROUPS) {
      b_tile[i / B_COLS * B_STRIDE + i % B_COLS] =
          b[i / B_COLS * B_DEVICE_STRIDE + i % B_COLS + k * (B_IS_KN ? N : 1)];
    }
    lily_threadgroup_barrier();
    if (B_IS_KN) {
      tile.template multiply_nn<HALF_K>(a_tile, A_STRIDE, b_tile + int(simdgroup) * COLS, B_STRIDE, lane);
    } else {
      tile.template multiply_nt<HALF_K>(
          a_tile, A_STRIDE, b_tile + int(simdgroup) * COLS * B_STRIDE, B_STRIDE, lane);
    }
    lily_threadgroup_barrier();
  }
  LILY_UNROLL
  for (int i = 0; i < tile.ELEMENTS; ++i) {
    c[tile.row(i, lane) * N + int(simdgroup) * COLS + tile.col(i, lane)] = tile.values[i];
  }
}

// ---- body ----
LILY_THREADGROUP_ARRAY(T, a_tile, M * (K / 2 + 16 / int(sizeof(T))));
LILY_THREADGROUP_ARRAY(T, b_tile, (B_IS_KN ? K / 2 : N) * ((B_IS_KN ? N : K / 2) + 16 / int(sizeof(T))));
tile_product<T, M, N, K, B_IS_KN, SIMDGROUPS>(
    a, b, c, a_tile, b_tile, thread_index_in_threadgroup, simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup);
