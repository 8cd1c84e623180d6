// C = A B^T for B quantised as MLX does, in one threadgroup: the loop over k that the prefill products share.
//
// A [ROWS, K] is gathered row by row from device memory; B are COUNT matrices of 4- or 8-bit numbers, of which every
// simdgroup takes COLS rows (columns of C) for itself.
//
// Who owns what: A's tile of STEP columns lies in threadgroup memory, read by every simdgroup. A simdgroup has all ROWS
// rows of its columns of C, so each number of B is loaded by one simdgroup and expanded once, in its registers: the
// expanded matrix exists in no memory at all. While a step is multiplied, the next one's
// numbers are under way to registers; with two buffers a step costs one barrier.
//
// A block that is not full should not pay for rows it lacks: lily_for_rows picks among three sizes of the same code.
//
// Limits: STEP 64 or 128, K a multiple of STEP and of GROUP; ROWS and COLS multiples of 16; COUNT * ROWS * COLS / 32 values a lane.

template <typename T, int ROWS, int STEP>
struct lily_product_buffers {
  // Two if they fit into Metal's 32 KB of threadgroup memory.
  enum : int {
    ELEMENTS = ROWS * STEP,
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

template <typename T, typename ScaleT, int COUNT, int ROWS, int COLS, int K, int BITS, int GROUP, int STEP, int SIMDGROUPS>
struct lily_tile_product {
  static_assert(K % STEP == 0 && K % GROUP == 0, "K is a multiple of the step and of the group size");
  using Buffers = lily_product_buffers<T, ROWS, STEP>;
  using Tile = lily_tile<T, ROWS, COLS>;
  using Right = lily_packed_right<T, ScaleT, COLS, BITS, GROUP, STEP>;
  enum : int {
    THREADS = 32 * SIMDGROUPS,
    ROW_CHUNKS = STEP / 8,  // of 8 values, in a row of A's tile
    CHUNKS = ROWS * int(ROW_CHUNKS),
    LOADS = (int(CHUNKS) + int(THREADS) - 1) / int(THREADS),
    ROWS_APART = int(THREADS) / int(ROW_CHUNKS)
  };

  LILY_THREADGROUP T* memory;  // [Buffers::TOTAL]
  u32 thread_index;
  u32 lane;
  Tile tiles[COUNT];

  LILY_INLINE int row_of_load(int i) const {
    return int(thread_index / u32(ROW_CHUNKS)) + i * ROWS_APART;
  }

  LILY_INLINE void fetch(
      LILY_DEVICE const T* a, LILY_THREAD const u32* starts, LILY_THREAD lily_vec<T, 8>* staged) const {
    LILY_UNROLL
    for (int i = 0; i < LOADS; ++i) {
      staged[i] = lily_load<8>(a + i64(starts[i]) * 8);
    }
  }

  LILY_INLINE void put(LILY_THREADGROUP T* buffer, LILY_THREAD const lily_vec<T, 8>* staged) const {
    LILY_UNROLL
    for (int i = 0; i < LOADS; ++i) {
      if (CHUNKS % THREADS == 0 || row_of_load(i) < ROWS) {
        lily_packed_left<T, STEP>::put(buffer, row_of_load(i), int(thread_index % u32(ROW_CHUNKS)), staged[i]);
      }
    }
  }

  // The row of A that row_of_load(i) is starts at a + 8 * starts[i]; rows that A lacks repeat one that it has. Rows of
  // the matrices from `cols` on repeat the last.
  LILY_INLINE void run(
      LILY_DEVICE const T* a, LILY_THREAD const u32* starts, LILY_THREAD const lily_packed_rows_at<ScaleT>* matrices,
      int cols) {
    lily_vec<T, 8> staged[LOADS];
    Right right[COUNT];
    a += thread_index % u32(ROW_CHUNKS) * 8;
    fetch(a, starts, staged);
    LILY_UNROLL
    for (int t = 0; t < COUNT; ++t) {
      right[t].load(matrices[t].words, matrices[t].scales, matrices[t].biases, K, 0, cols, lane);
      tiles[t].zero();
    }
    put(memory, staged);
    lily_threadgroup_barrier();
    int current = 0;
    LILY_NO_UNROLL
    for (int column = 0; column < K; column += STEP) {
      Right next[COUNT];
      const bool is_last = column + STEP == K;
      if (!is_last) {
        a += STEP;
        fetch(a, starts, staged);
        LILY_UNROLL
        for (int t = 0; t < COUNT; ++t) {
          next[t].load(matrices[t].words, matrices[t].scales, matrices[t].biases, K, column + STEP, cols, lane);
        }
      }
      lily_multiply_packed<COUNT>(tiles, memory + current, right, lane);
      if (!is_last) {
        if (Buffers::COUNT == 1) {
          lily_threadgroup_barrier();
        } else {
          current = Buffers::ELEMENTS - current;
        }
        put(memory + current, staged);
        lily_threadgroup_barrier();
        LILY_UNROLL
        for (int t = 0; t < COUNT; ++t) {
          right[t] = next[t];
        }
      }
    }
  }
};

// op.run<USED>() for the smallest USED >= rows of ROWS / 4, ROWS / 2 and ROWS that is a multiple of 16. rows is the same
// for a whole threadgroup.
template <int ROWS, typename Op>
LILY_INLINE void lily_for_rows(LILY_THREAD const Op& op, int rows) {
  enum : int { QUARTER = ROWS / 4, HALF = ROWS / 2 };
  if (QUARTER % 16 == 0 && rows <= QUARTER) {
    op.template run<QUARTER % 16 == 0 ? QUARTER : ROWS>();
  } else if (HALF % 16 == 0 && rows <= HALF) {
    op.template run<HALF % 16 == 0 ? HALF : ROWS>();
  } else {
    op.template run<ROWS>();
  }
}
