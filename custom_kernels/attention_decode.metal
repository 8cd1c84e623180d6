// Attention of one token over the KV cache: in one pass, or over blocks of rows that attention_combine puts together.
//
//   out = softmax(q K^T / sqrt(D)) V * sigmoid(gate)     over the rows 0 .. length - 1, length = position[0] + 1
//
//   q            [1, Hq, 1, D]        QT
//   keys, values [1, Hk, capacity, D] KvT
//   position     [8]                  i32   position[0]: this token's, whose row is in the cache already;
//                                           position[1]: capacity
//   projected    [*]                  KvT   only in one pass: the output gate of head h is D elements at
//                                           GATE_OFFSET + h GATE_STRIDE
//   out          [*]                  OutT  in one pass: [1, 1, Hq D]
//                                           in blocks:   f32, what attention_combine takes:
//                                           [BLOCKS, Hq, D] sums over a block, not divided yet, then
//                                           [Hq, BLOCKS, 2] largest score in bits (log2), sum of 2^(score - largest)
//
// Query head h reads KV head h / GROUP. No row past the length is read. HEADS = 0 is the form in blocks.
//
// In blocks, who owns what: a threadgroup owns up to 8 query heads of one KV head and a block of rows, which it takes
// ROWS at a time: first their keys, then their values lie in threadgroup memory. For Q K^T a simdgroup takes 16 rows
// and one of SPLITS parts of the columns; in the softmax a head, a lane a row; for P V a simdgroup takes
// D / SIMDGROUPS columns of all rows, so that nothing is merged at the end. BLOCKS is the grid's y: general
// (BLOCK_ROWS = 0), the length is divided evenly among the blocks, so that all of them work at any length; fixed, block
// b has the rows from b BLOCK_ROWS on. A block past the length writes neutral sums.
//
// In one pass: a threadgroup owns HEADS query heads of one KV head and COLUMNS columns of the output, over all rows.
// Scores need whole keys, so each of the D / COLUMNS threadgroups of a head computes all of its scores, and only the
// values are divided among them. A simdgroup takes STEPS x STEP_ROWS keys at a time, LANES lanes a row, then
// VALUE_STEP_ROWS values, VALUE_LANES lanes a row; the simdgroups' sums are added at the end. Up to SCORE_ROWS rows
// meet at one barrier.
//
// Limits: D a multiple of 32; in blocks of 16 SIMDGROUPS; in one pass HEADS 1, 2, 4 or 8, COLUMNS a divisor of D that
// is 1 to 32 loads of a power of two.
//
// Why matrix units lose nothing in blocks: their tiles have 16 rows and a KV head has 8 query heads or fewer. The other
// half holds what is left of q, and of the weights, after rounding to 16 bits: with high and low parts the products are
// those of fp32 numbers of 16 (bfloat16) or 22 (float16) bits, and keys and values are exact.
//
// Why one pass does without them: their operands pass through threadgroup memory, a barrier every few rows, and a
// threadgroup that has a head's rows to itself waits at each. In registers rows wait for nothing but memory.

#include "common/gates.h"

// In one pass; HEADS = 0 below is the form in blocks.
template <typename KvT, int D, int SIMDGROUPS, int HEADS, int COLUMNS>
struct AttentionDecodeTile {
  enum : int {
    UNIT = 16 / int(sizeof(KvT)),  // elements of a load
    LOADS_PER_ROW = D / UNIT,
    LANES = LOADS_PER_ROW <= 8 ? 8 : 16,  // of a row of keys
    CHUNKS = (LOADS_PER_ROW + LANES - 1) / LANES,
    STEP_ROWS = 32 / LANES,
    KEY_LOADS = 8,  // of a lane at a time, at most
    STEPS = KEY_LOADS / CHUNKS < LANES / HEADS ? KEY_LOADS / CHUNKS : LANES / HEADS,
    VALUE_LANES = COLUMNS / UNIT,
    VALUE_STEP_ROWS = 32 / VALUE_LANES,
    VALUE_STRIDE = SIMDGROUPS * VALUE_STEP_ROWS,
    VALUE_STEPS = 4,
    THREADS = SIMDGROUPS * 32,
    OUTPUTS_PER_THREAD = (HEADS * COLUMNS + THREADS - 1) / THREADS,
    SCORE_ROWS = 4096 / HEADS,
    SCORES_SIZE = SCORE_ROWS * HEADS,
    MERGED_SIZE = SIMDGROUPS * HEADS * COLUMNS,
    // The sums lie where the scores were.
    FIGURES_AT = SCORES_SIZE > MERGED_SIZE ? SCORES_SIZE : MERGED_SIZE,
    MEMORY_SIZE = FIGURES_AT + SIMDGROUPS * HEADS
  };
  static_assert((HEADS & (HEADS - 1)) == 0 && HEADS <= 8, "HEADS is 1, 2, 4 or 8");
  static_assert(D % COLUMNS == 0 && COLUMNS % UNIT == 0 && 32 % VALUE_LANES == 0, "whole rows of values a load");
};

template <typename KvT, int D, int SIMDGROUPS>
struct AttentionDecodeTile<KvT, D, SIMDGROUPS, 0, 0> {
  enum : int {
    UNIT = 16 / int(sizeof(KvT)),  // elements of a load
    HEADS = 8,
    HAS_LOW = sizeof(KvT) == 2,
    LEFT_ROWS = HAS_LOW ? 16 : 8,
    ROWS = 64 / int(sizeof(KvT)),
    STRIDE = D + UNIT,  // of q, keys and values: an odd multiple of 16 bytes
    ROW_GROUPS = ROWS / 16,
    SPLITS = SIMDGROUPS >= 2 * ROW_GROUPS ? 2 : 1,
    SCORE_STRIDE = ROWS + 8,
    WEIGHT_STRIDE = ROWS + UNIT,
    THREADS = SIMDGROUPS * 32,
    CHUNKS = ROWS * D / UNIT,
    LOADS = (CHUNKS + THREADS - 1) / THREADS,
    Q_SIZE = LEFT_ROWS * STRIDE,
    // Of a matrix with 8 rows the product reads 16, and the upper half of its result is not used.
    WEIGHTS_SIZE = 16 * WEIGHT_STRIDE,
    KV_SIZE = ROWS * STRIDE,
    SCORES_SIZE = SPLITS * 16 * SCORE_STRIDE,
    SCORES_AT = (Q_SIZE + KV_SIZE + WEIGHTS_SIZE) * int(sizeof(KvT)) / 4,
    MEMORY_SIZE = SCORES_AT + SCORES_SIZE + HEADS
  };
  static_assert(D % 32 == 0 && D % (16 * SIMDGROUPS) == 0, "simdgroups have whole tiles of columns");
  static_assert(KV_SIZE * int(sizeof(KvT)) >= 16 * D * 4, "the sums fit where the values were");
};

// A row that does not exist is zeros.
template <int UNIT, typename T>
LILY_INLINE lily_vec<T, UNIT> attention_decode_load_if(bool exists, LILY_DEVICE const T* source) {
  if (exists) {
    return lily_load<UNIT>(source);
  }
  const f32 zeros[UNIT] = {};
  return lily_pack<T, UNIT>(zeros);
}

// Rows first_row .. of the tile, of which those before end exist: to registers, and from there to threadgroup memory.
template <typename Tile, typename KvT, int D>
LILY_INLINE void attention_decode_load(
    LILY_DEVICE const KvT* source, int first_row, int end, uint thread_index,
    LILY_THREAD lily_vec<KvT, Tile::UNIT>* staged) {
  constexpr int UNIT = Tile::UNIT;
  LILY_UNROLL
  for (int i = 0; i < Tile::LOADS; ++i) {
    const int chunk = i * Tile::THREADS + int(thread_index);
    const int row = first_row + chunk / (D / UNIT);
    staged[i] = attention_decode_load_if<UNIT>(
        chunk < Tile::CHUNKS && row < end, source + i64(row) * D + chunk % (D / UNIT) * UNIT);
  }
}

template <typename Tile, typename KvT, int D>
LILY_INLINE void attention_decode_put(
    LILY_THREADGROUP KvT* target, uint thread_index, LILY_THREAD const lily_vec<KvT, Tile::UNIT>* staged) {
  constexpr int UNIT = Tile::UNIT;
  LILY_UNROLL
  for (int i = 0; i < Tile::LOADS; ++i) {
    const int chunk = i * Tile::THREADS + int(thread_index);
    if (chunk < Tile::CHUNKS) {
      lily_store(target + chunk / (D / UNIT) * Tile::STRIDE + chunk % (D / UNIT) * UNIT, staged[i]);
    }
  }
}

// x as a high and a low part in rows h and h + 8 of a left matrix.
template <typename Tile, typename KvT>
LILY_INLINE void attention_decode_split(LILY_THREADGROUP KvT* at, int stride, f32 x) {
  const KvT high = lily_from_f32<KvT>(x);
  at[0] = high;
  if (Tile::HAS_LOW) {
    at[Tile::HEADS * stride] = lily_from_f32<KvT>(x - lily_to_f32(high));
  }
}

template <typename QT, typename KvT, typename OutT, int Hk, int GROUP, int D, int SIMDGROUPS, int BLOCK_ROWS>
LILY_INLINE void attention_decode_blocks(
    LILY_DEVICE const QT* q,
    LILY_DEVICE const KvT* keys,
    LILY_DEVICE const KvT* values,
    LILY_DEVICE const i32* position,
    LILY_DEVICE OutT* out,
    LILY_THREADGROUP f32* shared,
    uint heads_index,  // KV head and which 8 of its query heads
    uint block,
    uint blocks,
    uint thread_index,
    uint simdgroup,
    uint lane) {
  using Tile = AttentionDecodeTile<KvT, D, SIMDGROUPS, 0, 0>;
  constexpr int HEADS = Tile::HEADS;
  constexpr int UNIT = Tile::UNIT;
  constexpr int ROWS = Tile::ROWS;
  constexpr int THREADS = Tile::THREADS;
  constexpr int SPLITS = Tile::SPLITS;
  constexpr int HEADS_PER_SIMDGROUP = (HEADS + SIMDGROUPS - 1) / SIMDGROUPS;
  constexpr int COLUMNS = D / SIMDGROUPS;
  constexpr int THREADGROUPS_PER_KV_HEAD = (GROUP + HEADS - 1) / HEADS;
  constexpr int Hq = Hk * GROUP;
  const f32 lowest = -1e30f;  // stands for minus infinity: differences of it stay finite
  LILY_THREADGROUP f32* scores = shared + Tile::SCORES_AT;       // [SPLITS, 16, SCORE_STRIDE]
  LILY_THREADGROUP f32* of_heads = scores + Tile::SCORES_SIZE;  // [HEADS]: factor of the sums so far

  const int kv_head = int(heads_index) / THREADGROUPS_PER_KV_HEAD;
  const int first_of_group = int(heads_index) % THREADGROUPS_PER_KV_HEAD * HEADS;
  const int first_head = kv_head * GROUP + first_of_group;
  const int heads = lily_min(HEADS, GROUP - first_of_group);
  // q does not wait for the position. Threads without an element, and heads that do not exist, read the last one.
  constexpr int Q_PER_THREAD = (HEADS * D + THREADS - 1) / THREADS;
  QT q_words[Q_PER_THREAD];
  LILY_UNROLL
  for (int i = 0; i < Q_PER_THREAD; ++i) {
    q_words[i] = q[first_head * D + lily_min(i * THREADS + int(thread_index), heads * D - 1)];
  }
  const int length = position[0] + 1;
  const int capacity = position[1];
  const int tiles = (length + ROWS - 1) / ROWS;
  const int block_rows = BLOCK_ROWS > 0 ? BLOCK_ROWS : (tiles + int(blocks) - 1) / int(blocks) * ROWS;
  const int begin = int(block) * block_rows;
  const int end = lily_min(begin + block_rows, length);
  keys += i64(kv_head) * capacity * D;
  values += i64(kv_head) * capacity * D;

  lily_vec<KvT, UNIT> key_words[Tile::LOADS];
  lily_vec<KvT, UNIT> value_words[Tile::LOADS];
  attention_decode_load<Tile, KvT, D>(keys, begin, end, thread_index, key_words);
  attention_decode_load<Tile, KvT, D>(values, begin, end, thread_index, value_words);

  LILY_THREADGROUP KvT* queries = reinterpret_cast<LILY_THREADGROUP KvT*>(shared);
  LILY_THREADGROUP KvT* kv = queries + Tile::Q_SIZE;
  LILY_THREADGROUP KvT* weights = kv + Tile::KV_SIZE;
  LILY_UNROLL
  for (int i = 0; i < Q_PER_THREAD; ++i) {
    const int at = i * THREADS + int(thread_index);
    if (at < HEADS * D) {
      attention_decode_split<Tile, KvT>(
          queries + at / D * Tile::STRIDE + at % D, Tile::STRIDE, lily_to_f32(q_words[i]));
    }
  }

  // Scores are in bits, so that their exponential is exp2.
  const f32 scale = lily_rsqrt(f32(D)) * 1.4426950408889634f;
  f32 largest[HEADS_PER_SIMDGROUP];
  f32 total[HEADS_PER_SIMDGROUP];  // of this lane's weights
  LILY_UNROLL
  for (int i = 0; i < HEADS_PER_SIMDGROUP; ++i) {
    largest[i] = lowest;
    total[i] = 0.0f;
  }
  lily_tile<KvT, 16, COLUMNS> sums;
  sums.zero();
  LILY_NO_UNROLL
  for (int row = begin; row < end; row += ROWS) {
    attention_decode_put<Tile, KvT, D>(kv, thread_index, key_words);
    if (row + ROWS < end) {
      attention_decode_load<Tile, KvT, D>(keys, row + ROWS, end, thread_index, key_words);
    }
    lily_threadgroup_barrier();
    for (int part = int(simdgroup); part < Tile::ROW_GROUPS * SPLITS; part += SIMDGROUPS) {
      const int first_row = part / SPLITS * 16;
      const int first_column = part % SPLITS * (D / SPLITS);
      lily_tile<KvT, 16, 16> product;
      product.zero();
      product.template multiply_nt<D / SPLITS>(
          queries + first_column, Tile::STRIDE, kv + first_row * Tile::STRIDE + first_column, Tile::STRIDE, lane);
      LILY_THREADGROUP f32* target = scores + part % SPLITS * (16 * Tile::SCORE_STRIDE) + first_row;
      LILY_UNROLL
      for (int i = 0; i < product.ELEMENTS; ++i) {
        target[product.row(i, lane) * Tile::SCORE_STRIDE + product.col(i, lane)] = product.values[i];
      }
    }
    lily_threadgroup_barrier();
    attention_decode_put<Tile, KvT, D>(kv, thread_index, value_words);
    if (row + ROWS < end) {
      attention_decode_load<Tile, KvT, D>(values, row + ROWS, end, thread_index, value_words);
    }
    LILY_UNROLL
    for (int i = 0; i < HEADS_PER_SIMDGROUP; ++i) {
      const int head = i * SIMDGROUPS + int(simdgroup);
      if (head < HEADS) {
        const bool exists = int(lane) < ROWS && row + int(lane) < end;
        f32 score = 0.0f;
        if (exists) {
          LILY_UNROLL
          for (int s = 0; s < SPLITS; ++s) {
            LILY_THREADGROUP const f32* at = scores + (s * 16 + head) * Tile::SCORE_STRIDE + int(lane);
            score += Tile::HAS_LOW ? at[0] + at[HEADS * Tile::SCORE_STRIDE] : at[0];
          }
        }
        const f32 new_largest = lily_max(largest[i], lily_simd_max(exists ? score * scale : lowest));
        const f32 factor = lily_fast_exp2(largest[i] - new_largest);
        const f32 weight = exists ? lily_fast_exp2(score * scale - new_largest) : 0.0f;
        largest[i] = new_largest;
        total[i] = total[i] * factor + weight;
        if (int(lane) < ROWS) {
          attention_decode_split<Tile, KvT>(
              weights + head * Tile::WEIGHT_STRIDE + int(lane), Tile::WEIGHT_STRIDE, weight);
        }
        if (lane == 0) {
          of_heads[head] = factor;
        }
      }
    }
    lily_threadgroup_barrier();
    LILY_UNROLL
    for (int i = 0; i < sums.ELEMENTS; ++i) {
      sums.values[i] *= of_heads[sums.row(i, lane) % HEADS];
    }
    sums.template multiply_nn<ROWS>(
        weights, Tile::WEIGHT_STRIDE, kv + int(simdgroup) * COLUMNS, Tile::STRIDE, lane);
    lily_threadgroup_barrier();
  }

  LILY_UNROLL
  for (int i = 0; i < HEADS_PER_SIMDGROUP; ++i) {
    const int head = i * SIMDGROUPS + int(simdgroup);
    if (head < HEADS) {
      const f32 sum = lily_simd_sum(total[i]);
      if (lane == 0 && head < heads) {
        LILY_DEVICE OutT* stats = out + i64(blocks) * (Hq * D) + ((first_head + head) * i64(blocks) + int(block)) * 2;
        stats[0] = lily_from_f32<OutT>(largest[i]);
        stats[1] = lily_from_f32<OutT>(sum);
      }
    }
  }
  // High and low parts are added where the values were.
  LILY_THREADGROUP f32* rows = reinterpret_cast<LILY_THREADGROUP f32*>(kv);
  LILY_UNROLL
  for (int i = 0; i < sums.ELEMENTS; ++i) {
    rows[sums.row(i, lane) * D + int(simdgroup) * COLUMNS + sums.col(i, lane)] = sums.values[i];
  }
  lily_threadgroup_barrier();
  out += (i64(block) * Hq + first_head) * D;
  LILY_UNROLL
  for (int start = 0; start < HEADS * D; start += THREADS * 4) {
    const int i = start + int(thread_index) * 4;
    if (i < heads * D) {
      f32 columns[4];
      f32 low[4] = {};
      lily_unpack(lily_load<4>(rows + i), columns);
      if (Tile::HAS_LOW) {
        lily_unpack(lily_load<4>(rows + i + HEADS * D), low);
      }
      LILY_UNROLL
      for (int c = 0; c < 4; ++c) {
        columns[c] += low[c];
      }
      lily_store<4>(out + i, lily_pack<OutT, 4>(columns));
    }
  }
}

// The lane's part of the keys that its simdgroup takes at a time, from first_row on.
template <typename Tile, typename KvT, int D>
LILY_INLINE void attention_decode_keys(
    LILY_DEVICE const KvT* keys, int first_row, int end, uint lane,
    LILY_THREAD lily_vec<KvT, Tile::UNIT>* words) {
  const int row = first_row + int(lane) / Tile::LANES;
  LILY_DEVICE const KvT* source = keys + i64(row) * D;
  LILY_UNROLL
  for (int i = 0; i < Tile::STEPS * Tile::CHUNKS; ++i) {
    const int step_row = i / Tile::CHUNKS * Tile::STEP_ROWS;
    const int load = i % Tile::CHUNKS * Tile::LANES + int(lane) % Tile::LANES;
    words[i] = attention_decode_load_if<Tile::UNIT>(
        load < Tile::LOADS_PER_ROW && row + step_row < end, source + step_row * D + load * Tile::UNIT);
  }
}

// And of the values, whose rows are VALUE_STRIDE apart.
template <typename Tile, typename KvT, int D>
LILY_INLINE void attention_decode_values(
    LILY_DEVICE const KvT* values, int first_row, int end, uint lane,
    LILY_THREAD lily_vec<KvT, Tile::UNIT>* words) {
  const int row = first_row + int(lane) / Tile::VALUE_LANES;
  LILY_DEVICE const KvT* source = values + i64(row) * D + int(lane) % Tile::VALUE_LANES * Tile::UNIT;
  LILY_UNROLL
  for (int i = 0; i < Tile::VALUE_STEPS; ++i) {
    const int step_row = i * Tile::VALUE_STRIDE;
    words[i] = attention_decode_load_if<Tile::UNIT>(row + step_row < end, source + step_row * D);
  }
}

// The lane's part of the threadgroup's queries. In the place of a head that does not exist is the last one. They are
// scaled so that scores are in bits, and their exponential is exp2.
template <typename Tile, int HEADS, int D, typename QT>
LILY_INLINE void attention_decode_queries(
    LILY_DEVICE const QT* q, int heads, uint lane, LILY_THREAD f32* queries) {
  constexpr int UNIT = Tile::UNIT;
  const f32 scale = lily_rsqrt(f32(D)) * 1.4426950408889634f;
  LILY_UNROLL
  for (int i = 0; i < HEADS * Tile::CHUNKS; ++i) {
    const int load = i % Tile::CHUNKS * Tile::LANES + int(lane) % Tile::LANES;
    const int head = lily_min(i / int(Tile::CHUNKS), heads - 1);
    f32 numbers[UNIT];
    lily_unpack(lily_load<UNIT>(q + head * D + lily_min(load, Tile::LOADS_PER_ROW - 1) * UNIT), numbers);
    LILY_UNROLL
    for (int k = 0; k < UNIT; ++k) {
      queries[i * UNIT + k] = load < Tile::LOADS_PER_ROW ? numbers[k] * scale : 0.0f;
    }
  }
}

// Sums of COUNT values over groups of LANES lanes: lane l gets that of value l % COUNT.
template <int COUNT, int LANES>
LILY_INLINE f32 attention_decode_sums(LILY_THREAD f32* x, uint lane) {
  LILY_UNROLL
  for (int count = COUNT / 2; count > 0; count /= 2) {
    const bool upper = (int(lane) & count) != 0;
    LILY_UNROLL
    for (int i = 0; i < count; ++i) {
      const f32 other = lily_shuffle_xor(upper ? x[i] : x[i + count], u32(count));
      x[i] = (upper ? x[i + count] : x[i]) + other;
    }
  }
  LILY_UNROLL
  for (int mask = COUNT; mask < LANES; mask *= 2) {
    x[0] += lily_shuffle_xor(x[0], u32(mask));
  }
  return x[0];
}

// The largest x over the lanes of the same head, lane % HEADS.
template <int HEADS>
LILY_INLINE f32 attention_decode_largest(f32 x) {
  LILY_UNROLL
  for (int mask = HEADS; mask < 32; mask *= 2) {
    x = lily_max(x, lily_shuffle_xor(x, u32(mask)));
  }
  return x;
}

template <
    typename QT, typename KvT, int Hk, int GROUP, int D, int SIMDGROUPS, int HEADS, int COLUMNS, int GATE_OFFSET,
    int GATE_STRIDE>
LILY_INLINE void attention_decode_one_pass(
    LILY_DEVICE const QT* q,
    LILY_DEVICE const KvT* keys,
    LILY_DEVICE const KvT* values,
    LILY_DEVICE const i32* position,
    LILY_DEVICE const KvT* projected,
    LILY_DEVICE KvT* out,
    LILY_THREADGROUP f32* scores,  // [SCORE_ROWS, HEADS]
    uint part_index,               // KV head, which HEADS of its query heads, which columns
    uint thread_index,
    uint simdgroup,
    uint lane) {
  using Tile = AttentionDecodeTile<KvT, D, SIMDGROUPS, HEADS, COLUMNS>;
  constexpr int UNIT = Tile::UNIT;
  constexpr int LANES = Tile::LANES;
  constexpr int CHUNKS = Tile::CHUNKS;
  constexpr int STEPS = Tile::STEPS;
  constexpr int VALUE_LANES = Tile::VALUE_LANES;
  constexpr int VALUE_STEPS = Tile::VALUE_STEPS;
  constexpr int KEY_STRIDE = SIMDGROUPS * STEPS * Tile::STEP_ROWS;  // rows that all simdgroups take at a time
  constexpr int COLUMN_PARTS = D / COLUMNS;
  constexpr int HEAD_PARTS = (GROUP + HEADS - 1) / HEADS;
  const f32 lowest = -1e30f;  // stands for minus infinity: differences of it stay finite

  const int first_column = int(part_index) % COLUMN_PARTS * COLUMNS;
  const int head_part = int(part_index) / COLUMN_PARTS;
  const int kv_head = head_part / HEAD_PARTS;
  const int first_of_group = head_part % HEAD_PARTS * HEADS;
  const int first_head = kv_head * GROUP + first_of_group;
  const int heads = lily_min(HEADS, GROUP - first_of_group);
  LILY_THREADGROUP f32* figures = scores + Tile::FIGURES_AT;  // [SIMDGROUPS, HEADS]: largest scores, then totals

  // Neither q nor the gate waits for the position.
  f32 queries[HEADS * CHUNKS * UNIT];
  attention_decode_queries<Tile, HEADS, D>(q + first_head * D, heads, lane, queries);
  KvT gates[Tile::OUTPUTS_PER_THREAD];
  LILY_UNROLL
  for (int i = 0; i < Tile::OUTPUTS_PER_THREAD; ++i) {
    const int output = lily_min(i * Tile::THREADS + int(thread_index), heads * COLUMNS - 1);
    gates[i] =
        projected[GATE_OFFSET + (first_head + output / COLUMNS) * GATE_STRIDE + first_column + output % COLUMNS];
  }
  const int length = position[0] + 1;
  keys += i64(kv_head) * position[1] * D;
  values += i64(kv_head) * position[1] * D + first_column;

  f32 largest[HEADS];
  f32 total[HEADS];
  f32 sums[HEADS][UNIT];
  LILY_UNROLL
  for (int h = 0; h < HEADS; ++h) {
    largest[h] = lowest;
    total[h] = 0.0f;
    LILY_UNROLL
    for (int k = 0; k < UNIT; ++k) {
      sums[h][k] = 0.0f;
    }
  }
  int begin = 0;
  LILY_NO_UNROLL
  while (true) {
    const int end = lily_min(begin + int(Tile::SCORE_ROWS), length);
    const int first_key = begin + int(simdgroup) * (STEPS * Tile::STEP_ROWS);
    const int first_value = begin + int(simdgroup) * Tile::VALUE_STEP_ROWS;

    // Scores.
    lily_vec<KvT, UNIT> key_words[STEPS * CHUNKS];
    attention_decode_keys<Tile, KvT, D>(keys, first_key, end, lane, key_words);
    f32 own_largest = lowest;  // of head lane % HEADS
    LILY_NO_UNROLL
    for (int row = first_key; row < end; row += KEY_STRIDE) {
      f32 products[STEPS * HEADS];
      LILY_UNROLL
      for (int i = 0; i < STEPS * HEADS; ++i) {
        products[i] = 0.0f;
      }
      LILY_UNROLL
      for (int i = 0; i < STEPS * CHUNKS; ++i) {
        f32 numbers[UNIT];
        lily_unpack(key_words[i], numbers);
        LILY_UNROLL
        for (int h = 0; h < HEADS; ++h) {
          LILY_UNROLL
          for (int k = 0; k < UNIT; ++k) {
            const int at = i / CHUNKS * HEADS + h;
            products[at] = lily_fma(numbers[k], queries[(h * CHUNKS + i % CHUNKS) * UNIT + k], products[at]);
          }
        }
      }
      attention_decode_keys<Tile, KvT, D>(keys, row + KEY_STRIDE, end, lane, key_words);
      const f32 score = attention_decode_sums<STEPS * HEADS, LANES>(products, lane);
      const int step = int(lane) % (STEPS * HEADS) / HEADS;
      const int own_row = row + step * Tile::STEP_ROWS + int(lane) / LANES;
      if (own_row < end) {
        own_largest = lily_max(own_largest, score);
        if (int(lane) % LANES < STEPS * HEADS) {
          scores[(own_row - begin) * HEADS + int(lane) % HEADS] = score;
        }
      }
    }

    // Values are under way while the simdgroups wait for one another.
    lily_vec<KvT, UNIT> value_words[VALUE_STEPS];
    attention_decode_values<Tile, KvT, D>(values, first_value, end, lane, value_words);
    own_largest = attention_decode_largest<HEADS>(own_largest);
    if (int(lane) < HEADS) {
      figures[int(simdgroup) * HEADS + int(lane)] = own_largest;
    }
    lily_threadgroup_barrier();
    own_largest = lowest;
    LILY_UNROLL
    for (int i = 0; i < SIMDGROUPS * HEADS; i += 32) {
      const int at = i + int(lane);
      own_largest = lily_max(own_largest, at < SIMDGROUPS * HEADS ? figures[at] : lowest);
    }
    own_largest = attention_decode_largest<HEADS>(own_largest);
    LILY_UNROLL
    for (int h = 0; h < HEADS; ++h) {
      const f32 new_largest = lily_max(largest[h], lily_shuffle(own_largest, u32(h)));
      const f32 factor = lily_fast_exp2(largest[h] - new_largest);
      largest[h] = new_largest;
      total[h] *= factor;
      LILY_UNROLL
      for (int k = 0; k < UNIT; ++k) {
        sums[h][k] *= factor;
      }
    }
    LILY_NO_UNROLL
    for (int row = first_value; row < end; row += VALUE_STEPS * Tile::VALUE_STRIDE) {
      LILY_UNROLL
      for (int i = 0; i < VALUE_STEPS; ++i) {
        const int own_row = row + i * Tile::VALUE_STRIDE + int(lane) / VALUE_LANES;
        f32 numbers[UNIT];
        lily_unpack(value_words[i], numbers);
        f32 own_scores[HEADS];
        lily_unpack(lily_load<HEADS>(scores + (lily_min(own_row, end - 1) - begin) * HEADS), own_scores);
        LILY_UNROLL
        for (int h = 0; h < HEADS; ++h) {
          const f32 weight = own_row < end ? lily_fast_exp2(own_scores[h] - largest[h]) : 0.0f;
          total[h] += weight;
          LILY_UNROLL
          for (int k = 0; k < UNIT; ++k) {
            sums[h][k] = lily_fma(weight, numbers[k], sums[h][k]);
          }
        }
      }
      attention_decode_values<Tile, KvT, D>(
          values, row + VALUE_STEPS * Tile::VALUE_STRIDE, end, lane, value_words);
    }
    lily_threadgroup_barrier();
    begin += Tile::SCORE_ROWS;
    if (begin >= length) {
      break;
    }
    // Read again, so that they need not be kept beside the values.
    attention_decode_queries<Tile, HEADS, D>(q + first_head * D, heads, lane, queries);
  }

  LILY_THREADGROUP f32* merged = scores;  // [SIMDGROUPS, HEADS, COLUMNS]
  LILY_UNROLL
  for (int h = 0; h < HEADS; ++h) {
    LILY_UNROLL
    for (int mask = VALUE_LANES; mask < 32; mask *= 2) {
      total[h] += lily_shuffle_xor(total[h], u32(mask));
      LILY_UNROLL
      for (int k = 0; k < UNIT; ++k) {
        sums[h][k] += lily_shuffle_xor(sums[h][k], u32(mask));
      }
    }
    const int at = int(simdgroup) * HEADS + h;
    if (int(lane) < VALUE_LANES) {
      lily_store(merged + at * COLUMNS + int(lane) * UNIT, lily_pack<f32, UNIT>(sums[h]));
    }
    if (lane == 0) {
      figures[at] = total[h];
    }
  }
  lily_threadgroup_barrier();
  LILY_UNROLL
  for (int i = 0; i < Tile::OUTPUTS_PER_THREAD; ++i) {
    const int output = i * Tile::THREADS + int(thread_index);
    if (output < heads * COLUMNS) {
      f32 sum = 0.0f;
      f32 divisor = 0.0f;
      LILY_UNROLL
      for (int s = 0; s < SIMDGROUPS; ++s) {
        sum += merged[s * (HEADS * COLUMNS) + output];
        divisor += figures[s * HEADS + output / COLUMNS];
      }
      out[(first_head + output / COLUMNS) * D + first_column + output % COLUMNS] =
          lily_from_f32<KvT>(sum / divisor * lily_sigmoid(lily_to_f32(gates[i])));
    }
  }
}

template <
    typename QT, typename KvT, typename OutT, int Hk, int GROUP, int D, int SIMDGROUPS, int BLOCK_ROWS, int HEADS,
    int COLUMNS, int GATE_OFFSET, int GATE_STRIDE>
LILY_INLINE void attention_decode(
    LILY_DEVICE const QT* q,
    LILY_DEVICE const KvT* keys,
    LILY_DEVICE const KvT* values,
    LILY_DEVICE const i32* position,
    LILY_DEVICE const KvT* projected,
    LILY_DEVICE OutT* out,
    LILY_THREADGROUP f32* memory,  // [MEMORY_SIZE]
    uint part,
    uint block,
    uint blocks,
    uint thread_index,
    uint simdgroup,
    uint lane) {
  if constexpr (HEADS > 0) {
    attention_decode_one_pass<QT, KvT, Hk, GROUP, D, SIMDGROUPS, HEADS, COLUMNS, GATE_OFFSET, GATE_STRIDE>(
        q, keys, values, position, projected, out, memory, part, thread_index, simdgroup, lane);
  } else {
    attention_decode_blocks<QT, KvT, OutT, Hk, GROUP, D, SIMDGROUPS, BLOCK_ROWS>(
        q, keys, values, position, out, memory, part, block, blocks, thread_index, simdgroup, lane);
  }
}

// ---- body ----
using Tile = AttentionDecodeTile<KvT, D, SIMDGROUPS, HEADS, COLUMNS>;
LILY_THREADGROUP_ARRAY(f32, memory, Tile::MEMORY_SIZE);
attention_decode<
    QT, KvT, OutT, Hk, GROUP, D, SIMDGROUPS, BLOCK_ROWS, HEADS, COLUMNS, GATE_OFFSET, GATE_STRIDE>(
    q, keys, values, position, reinterpret_cast<LILY_DEVICE const KvT*>(projected), out, memory,
    threadgroup_position_in_grid.x, threadgroup_position_in_grid.y, threadgroups_per_grid.y,
    thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
