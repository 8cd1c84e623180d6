// C = A B^T for B quantised as MLX does, in one threadgroup: the loop over k that the prefill products share.
//
// A [ROWS, K] is gathered row by row from device memory; B are COUNT matrices of 4- or 8-bit numbers, of which every
// simdgroup takes COLS rows (columns of C) for itself.
//
// Who owns what: A's tile of 64 columns lies in threadgroup memory, read by every simdgroup. A simdgroup has all ROWS
// rows of its columns of C, so each number of B is loaded by one simdgroup and expanded once, in its registers: the
// expanded matrix exists in no memory at all. While a step of 64 columns is multiplied, the next one's
// numbers are under way to registers; with two buffers a step costs one barrier.
//
// Limits: K a multiple of 64 and of GROUP; ROWS and COLS multiples of 16; COUNT * ROWS * COLS / 32 values a lane.

template <typename T, int ROWS>
struct lily_product_buffers {
  // Two if they fit into Metal's 32 KB of threadgroup memory.
  enum : int {
    ELEMENTS = ROWS * 64,
    COUNT = 2 * int(ELEMENTS) * int(sizeof(T)) <= 32768 ? 2 : 1,
    TOTAL = int(ELEMENTS) * int(COUNT)
  };
};

template <typename ScaleT>
struct lily_packed_rows_at {
  LILY_DEVICE const u32* words;
  LILY_DEVICE const ScaleT* scales;
  LILY_DEVICE const ScaleT* biases;
};

// The address of a row of a matrix [..., K]. 64 bits: an expert's first row may lie beyond 2^32 numbers.
template <int K, int BITS, int GROUP, typename ScaleT>
LILY_INLINE lily_packed_rows_at<ScaleT> lily_rows_from(lily_packed_rows_at<ScaleT> matrix, i64 row) {
  return {
      matrix.words + row * (K / 32 * BITS), matrix.scales + row * (K / GROUP), matrix.biases + row * (K / GROUP)};
}

template <typename T, typename ScaleT, int COUNT, int ROWS, int COLS, int K, int BITS, int GROUP, int SIMDGROUPS>
struct lily_tile_product {
  static_assert(K % 64 == 0 && K % GROUP == 0, "K is a multiple of 64 and of the group size");
  using Buffers = lily_product_buffers<T, ROWS>;
  using Tile = lily_tile<T, ROWS, COLS>;
  using Right = lily_packed_right<T, ScaleT, COLS, BITS, GROUP>;
  enum : int {
    THREADS = 32 * SIMDGROUPS,
    CHUNKS = ROWS * 8,  // of 8 values, in a tile of A
    LOADS = (int(CHUNKS) + int(THREADS) - 1) / int(THREADS),
    ROWS_APART = int(THREADS) / 8
  };

  LILY_THREADGROUP T* memory;  // [Buffers::TOTAL]
  int thread_index;
  u32 lane;
  Tile tiles[COUNT];

  // Of A's rows, `rows` are there; row r starts at a + 8 * starts[i], where i counts the rows of this thread. Rows of
  // the matrices from `cols` on repeat the last.
  LILY_INLINE int row_of_load(int i) const {
    return thread_index / 8 + i * ROWS_APART;
  }

  LILY_INLINE void fetch(
      LILY_DEVICE const T* a, LILY_THREAD const u32* starts, int column, int rows,
      LILY_THREAD lily_vec<T, 8>* staged) {
    LILY_UNROLL
    for (int i = 0; i < LOADS; ++i) {
      if (row_of_load(i) < rows) {
        staged[i] = lily_load<8>(a + i64(starts[i]) * 8 + (column + thread_index % 8 * 8));
      }
    }
  }

  LILY_INLINE void put(LILY_THREADGROUP T* buffer, int rows, LILY_THREAD const lily_vec<T, 8>* staged) {
    LILY_UNROLL
    for (int i = 0; i < LOADS; ++i) {
      if (row_of_load(i) < rows) {
        lily_packed_left<T>::put(buffer, row_of_load(i), thread_index % 8, staged[i]);
      }
    }
  }

  LILY_INLINE void run(
      LILY_DEVICE const T* a, LILY_THREAD const u32* starts, int rows,
      LILY_THREAD const lily_packed_rows_at<ScaleT>* matrices, int cols) {
    lily_vec<T, 8> staged[LOADS];
    Right right[COUNT];
    fetch(a, starts, 0, rows, staged);
    LILY_UNROLL
    for (int t = 0; t < COUNT; ++t) {
      right[t].load(matrices[t].words, matrices[t].scales, matrices[t].biases, K, 0, cols, lane);
      tiles[t].zero();
    }
    put(memory, rows, staged);
    lily_threadgroup_barrier();
    int current = 0;
    LILY_NO_UNROLL
    for (int column = 0; column < K; column += 64) {
      Right next[COUNT];
      const bool is_last = column + 64 == K;
      if (!is_last) {
        fetch(a, starts, column + 64, rows, staged);
        LILY_UNROLL
        for (int t = 0; t < COUNT; ++t) {
          next[t].load(matrices[t].words, matrices[t].scales, matrices[t].biases, K, column + 64, cols, lane);
        }
      }
      lily_multiply_packed<COUNT>(tiles, memory + current, right, rows, lane);
      if (!is_last) {
        if (Buffers::COUNT == 1) {
          lily_threadgroup_barrier();
        } else {
          current = Buffers::ELEMENTS - current;
        }
        put(memory + current, rows, staged);
        lily_threadgroup_barrier();
        LILY_UNROLL
        for (int t = 0; t < COUNT; ++t) {
          right[t] = next[t];
        }
      }
    }
  }
};
