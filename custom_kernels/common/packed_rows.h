// Rows of affine-quantised weights times one vector, in one simdgroup.
//
//   w = scale * q + bias, so over the numbers of a group  sum(w x) = scale * sum(q x) + bias * sum(x)
//
// A row [K] is K * BITS / 32 words, its first number in the lowest bits of its first word, and K / GROUP
// scales and biases.
//
// Decoding reads every weight once, so instructions a weight count as much as bytes. A number q of BITS bits is
// not converted: its bits become the top of a float's mantissa, which makes it START + q, and the sum starts
// from -START * sum(x) instead of zero. One shift serves two 4-bit numbers, the lower one with START 256, the
// upper one with START 16. What START costs in accuracy is START / 2^24 of a partial sum, which stays far
// below the rounding of a 16-bit result.
//
// START is read from threadgroup memory: `bits & mask | constant` is one instruction on NVIDIA GPUs, but only if
// the compiler does not know the constant.

// A matrix in one buffer: all weights, then all scales, then all biases, each from a multiple of 16 bytes on.
template <typename ScaleT>
struct lily_packed_matrix {
  LILY_DEVICE const u32* weight;
  LILY_DEVICE const ScaleT* scales;
  LILY_DEVICE const ScaleT* biases;

  static LILY_INLINE lily_packed_matrix at(LILY_DEVICE const u32* buffer, i64 words, i64 groups) {
    LILY_DEVICE const u32* scales = buffer + (words + 3) / 4 * 4;
    LILY_DEVICE const u32* biases = scales + (groups * i64(sizeof(ScaleT)) + 15) / 16 * 4;
    return {
        buffer, reinterpret_cast<LILY_DEVICE const ScaleT*>(scales),
        reinterpret_cast<LILY_DEVICE const ScaleT*>(biases)};
  }
};

// The part of the vector that meets one 16-byte load of a row. Numbers at even and at odd places have sums of
// their own.
template <int BITS>
struct lily_operand {
  enum : int { VALUES = 128 / BITS, START_EVEN = 256, START_ODD = BITS == 4 ? 16 : 256 };
  f32 x[VALUES];
  u32 even_top;    // the bits of START_EVEN
  u32 odd_top;
  f32 even_start;  // -START_EVEN * sum of x at even places
  f32 odd_start;
  f32 sum;
};

// sum(q x) over one 16-byte load.
template <int BITS>
LILY_INLINE f32 lily_packed_dot(lily_vec<u32, 4> words, LILY_THREAD const lily_operand<BITS>& operand) {
  static_assert(BITS == 4 || BITS == 8, "4 or 8 bits");
  f32 even = operand.even_start;
  f32 odd = operand.odd_start;
  LILY_UNROLL
  for (int i = 0; i < 4; ++i) {
    const u32 word = lily_word(words, i);
    LILY_THREAD const f32* x = operand.x + i * (32 / BITS);
    // The byte at bits 8 b to 8 b + 7, moved to bits 15 to 22, the top of the mantissa.
    const u32 bytes[4] = {word << 15, word << 7, word >> 1, word >> 9};
    LILY_UNROLL
    for (int b = 0; b < 4; ++b) {
      if constexpr (BITS == 4) {
        even = lily_fma(lily_f32_from_bits((bytes[b] & 0x00078000u) | operand.even_top), x[2 * b], even);
        odd = lily_fma(lily_f32_from_bits((bytes[b] & 0x00780000u) | operand.odd_top), x[2 * b + 1], odd);
      } else {
        const f32 number = lily_f32_from_bits((bytes[b] & 0x007f8000u) | operand.even_top);
        if (b % 2 == 0) {
          even = lily_fma(number, x[b], even);
        } else {
          odd = lily_fma(number, x[b], odd);
        }
      }
    }
  }
  return even + odd;
}

// A vector [K] in threadgroup memory as fp32, with the sums of every 8 values, even and odd places apart. Four
// floats of padding after every 32 keep lanes that read 32 (or 16) values each on different banks.
template <int K, int SIMDGROUPS>
struct lily_shared_vector {
  static_assert(K % 32 == 0, "K is a multiple of 32");
  enum : int {
    UNIT = 8,
    STEP = SIMDGROUPS * 32 * UNIT,  // of all threads
    SUMS_AT = K / 32 * 36,
    STARTS_AT = SUMS_AT + K / UNIT * 2,
    SQUARES_AT = STARTS_AT + 4,
    FLOATS = (SQUARES_AT + SIMDGROUPS + 3) / 4 * 4
  };
  LILY_THREADGROUP f32* memory;  // [FLOATS]

  // Called by all SIMDGROUPS * 32 threads; a barrier must follow. With NORM, stores x * norm_weight and what
  // inverse_rms needs.
  template <bool NORM, typename InT, typename NormT>
  LILY_INLINE void fill(LILY_DEVICE const InT* source, LILY_DEVICE const NormT* norm_weight, uint thread_index, uint lane) {
    f32 squares = 0.0f;
    LILY_UNROLL
    for (int start = 0; start < K; start += STEP) {  // a number of times that the compiler knows
      const int k = start + int(thread_index) * UNIT;
      if (K % STEP == 0 || k < K) {
        f32 x[UNIT];
        lily_unpack(lily_load<UNIT>(source + k), x);
        if constexpr (NORM) {
          squares += weigh(x, lily_load<UNIT>(norm_weight + k));
        }
        store(k, x);
      }
    }
    store_starts(thread_index);
    if constexpr (NORM) {
      store_squares(squares, thread_index, lane);
    }
  }

  // Its steps, for a kernel that loads x and norm_weight long before. x * norm_weight; the sum of x^2.
  template <typename NormT>
  static LILY_INLINE f32 weigh(LILY_THREAD f32* x, lily_vec<NormT, 8> norm_weight) {
    f32 weight[UNIT];
    lily_unpack(norm_weight, weight);
    f32 squares = 0.0f;
    LILY_UNROLL
    for (int i = 0; i < UNIT; ++i) {
      squares = lily_fma(x[i], x[i], squares);
      x[i] *= weight[i];
    }
    return squares;
  }

  // The values k to k + 7.
  LILY_INLINE void store(int k, LILY_THREAD const f32* x) {
    f32 sums[2] = {(x[0] + x[2]) + (x[4] + x[6]), (x[1] + x[3]) + (x[5] + x[7])};
    lily_store<UNIT>(memory + k + k / 32 * 4, lily_pack<f32, UNIT>(x));
    lily_store<2>(memory + SUMS_AT + k / UNIT * 2, lily_pack<f32, 2>(sums));
  }

  LILY_INLINE void store_starts(uint thread_index) {
    if (thread_index == 0) {
      f32 starts[4] = {
          lily_operand<4>::START_EVEN, lily_operand<4>::START_ODD,
          lily_operand<8>::START_EVEN, lily_operand<8>::START_ODD};
      lily_store<4>(memory + STARTS_AT, lily_pack<f32, 4>(starts));
    }
  }

  // squares: of the values that the thread has stored.
  LILY_INLINE void store_squares(f32 squares, uint thread_index, uint lane) {
    squares = lily_simd_sum(squares);
    if (lane == 0) {
      memory[SQUARES_AT + int(thread_index) / 32] = squares;
    }
  }

  // 1 / sqrt(mean(x^2) + eps).
  LILY_INLINE f32 inverse_rms(f32 eps) const {
    f32 squares = 0.0f;
    LILY_UNROLL
    for (int i = 0; i < SIMDGROUPS; ++i) {
      squares += memory[SQUARES_AT + i];
    }
    return lily_rsqrt(squares / f32(K) + eps);
  }

  // The values from k on, which is a multiple of their number.
  template <int BITS>
  LILY_INLINE void read(int k, LILY_THREAD lily_operand<BITS>& operand) const {
    enum : int { VALUES = lily_operand<BITS>::VALUES, SUMS = VALUES / UNIT * 2 };
    lily_unpack(lily_load<VALUES>(memory + k + k / 32 * 4), operand.x);
    f32 sums[SUMS];
    lily_unpack(lily_load<SUMS>(memory + SUMS_AT + k / UNIT * 2), sums);
    f32 even = sums[0];
    f32 odd = sums[1];
    LILY_UNROLL
    for (int i = 2; i < SUMS; i += 2) {
      even += sums[i];
      odd += sums[i + 1];
    }
    const int starts = STARTS_AT + (BITS == 4 ? 0 : 2);
    operand.even_top = lily_bits_from_f32(memory[starts]);
    operand.odd_top = lily_bits_from_f32(memory[starts + 1]);
    operand.even_start = -f32(lily_operand<BITS>::START_EVEN) * even;
    operand.odd_start = -f32(lily_operand<BITS>::START_ODD) * odd;
    operand.sum = even + odd;
  }
};

// ROWS consecutive rows of a matrix [N, K] for each group of LANES lanes, which reads them in CHUNKS steps of
// LANES * 16 bytes a row; the 32 / LANES groups of a simdgroup own consecutive blocks of ROWS rows. DEPTH
// chunks of all rows are in flight.
template <typename ScaleT, int BITS, int GROUP, int K, int ROWS, int AHEAD, int MAX_LANES>
struct lily_packed_rows {
  static_assert(BITS == 4 || BITS == 8, "4 or 8 bits");
  static_assert(GROUP == 32 || GROUP == 64 || GROUP == 128, "groups of 32, 64 or 128");
  static_assert(K % GROUP == 0, "K is a multiple of GROUP");
  static_assert((ROWS & (ROWS - 1)) == 0, "ROWS is a power of two");
  enum : int {
    VALUES = 128 / BITS,  // of one 16-byte load; within one group
    UNITS = K / VALUES,
    POWER_OF_TWO = UNITS & -UNITS,  // the largest that divides UNITS
    LANES = POWER_OF_TWO < MAX_LANES ? POWER_OF_TWO : MAX_LANES,
    CHUNK = LANES * VALUES,
    CHUNKS = K / CHUNK,
    DEPTH = AHEAD >= CHUNKS ? CHUNKS : CHUNKS % AHEAD == 0 ? AHEAD : 1,
    BLOCK_ROWS = 32 / LANES * ROWS,  // of the simdgroup
    OWNERS = ROWS < LANES ? ROWS : LANES,  // lanes that end up with sums of rows
    OWNED = ROWS / OWNERS,                 // rows each
    ROW_WORDS = K * BITS / 32,
    ROW_GROUPS = K / GROUP
  };

  // At this lane's first row.
  LILY_DEVICE const u32* weights;
  LILY_DEVICE const ScaleT* scales;
  LILY_DEVICE const ScaleT* biases;
  lily_vec<u32, 4> words[DEPTH][ROWS];
  ScaleT scale[DEPTH][ROWS];
  ScaleT bias[DEPTH][ROWS];
  f32 sums[ROWS];

  static LILY_INLINE int lane_in_row(uint lane) {
    return int(lane) % LANES;
  }
  // This lane's first row in the simdgroup's block.
  static LILY_INLINE int row_in_block(uint lane) {
    return int(lane) / LANES * ROWS;
  }
  // Where in the vector this lane's part of a chunk starts.
  static LILY_INLINE int column(int chunk, uint lane) {
    return (chunk * LANES + lane_in_row(lane)) * VALUES;
  }

  LILY_INLINE void start(
      LILY_DEVICE const u32* all_weights,
      LILY_DEVICE const ScaleT* all_scales,
      LILY_DEVICE const ScaleT* all_biases,
      i64 row) {
    weights = all_weights + row * ROW_WORDS;
    scales = all_scales + row * ROW_GROUPS;
    biases = all_biases + row * ROW_GROUPS;
  }

  LILY_INLINE void clear() {
    LILY_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      sums[r] = 0.0f;
    }
  }

  LILY_INLINE void load(int chunk, uint lane) {
    load(chunk, chunk % DEPTH, lane);
  }

  // place: chunk % DEPTH, where the compiler cannot know it: registers have no index.
  LILY_INLINE void load(int chunk, int place, uint lane) {
    const int word = chunk * (LANES * 4) + lane_in_row(lane) * 4;
    const int group = column(chunk, lane) / GROUP;
    LILY_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      words[place][r] = lily_load<4>(weights + r * ROW_WORDS + word);
    }
    LILY_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      scale[place][r] = scales[r * ROW_GROUPS + group];
      bias[place][r] = biases[r * ROW_GROUPS + group];
    }
  }

  LILY_INLINE void load_first(uint lane) {
    LILY_UNROLL
    for (int chunk = 0; chunk < DEPTH; ++chunk) {
      load(chunk, lane);
    }
  }

  LILY_INLINE void accumulate(int chunk, LILY_THREAD const lily_operand<BITS>& operand) {
    LILY_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const f32 dot = lily_packed_dot<BITS>(words[chunk % DEPTH][r], operand);
      sums[r] = lily_fma(lily_to_f32(bias[chunk % DEPTH][r]), operand.sum, sums[r]);
      sums[r] = lily_fma(lily_to_f32(scale[chunk % DEPTH][r]), dot, sums[r]);
    }
  }

  // Leaves the sums of whole rows in sums[0] to sums[OWNED - 1]: those of the rows from owned_row() on. While a
  // lane has several rows, it keeps half of them and gives its part of the others to its neighbour, so that
  // a sum for every row takes hardly more exchanges than one sum.
  LILY_INLINE void reduce(uint lane) {
    int rows = ROWS;
    LILY_UNROLL
    for (u32 mask = 1; mask < u32(LANES); mask *= 2) {
      const bool keeps_upper = (lane & mask) != 0;
      if (rows > 1) {
        rows /= 2;
        LILY_UNROLL
        for (int r = 0; r < ROWS / 2; ++r) {
          if (r < rows) {
            const f32 given = keeps_upper ? sums[r] : sums[r + rows];
            const f32 kept = keeps_upper ? sums[r + rows] : sums[r];
            sums[r] = kept + lily_shuffle_xor(given, mask);
          }
        }
      } else {
        sums[0] += lily_shuffle_xor(sums[0], mask);
      }
    }
  }

  static LILY_INLINE bool owns(uint lane) {
    return lane_in_row(lane) < OWNERS;
  }
  // The first row, in the lane's block of ROWS, whose sum the lane has after reduce().
  static LILY_INLINE int owned_row(uint lane) {
    int row = 0;
    LILY_UNROLL
    for (int i = 1; i < OWNERS; i *= 2) {
      row += (lane & u32(i)) != 0 ? ROWS / (2 * i) : 0;
    }
    return row;
  }
};
