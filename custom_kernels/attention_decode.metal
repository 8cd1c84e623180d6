// Attention of one token over the KV cache, each threadgroup over a block of rows.
//
//   out = softmax(q K^T / sqrt(D)) V          over the rows 0 .. length - 1, length = position[0] + 1
//
//   q            [1, Hq, 1, D]        QT
//   keys, values [1, Hk, capacity, D] KvT
//   position     [8]                  i32   position[0]: this token's, whose row is in the cache already;
//                                           position[1]: capacity
//   projected    [*]                  KvT   only if FINAL: the output gate of head h is D elements at
//                                           GATE_OFFSET + h GATE_STRIDE
//   out          [*]                  OutT  FINAL:     [1, 1, Hq D], divided and times sigmoid(gate)
//                                           not FINAL: f32, what attention_combine takes:
//                                           [BLOCKS, Hq, D] sums over a block, not divided yet, then
//                                           [Hq, BLOCKS, 2] largest score in bits (log2), sum of 2^(score - largest)
//
// Query head h reads KV head h / GROUP. BLOCKS is the grid's y; FINAL needs BLOCKS = 1.
//
// Who owns what: a threadgroup owns up to 8 query heads of one KV head and a block of rows, which it takes ROWS at a
// time: first their keys, then their values lie in threadgroup memory. For Q K^T a simdgroup takes 16 rows and one of
// SPLITS parts of the columns; in the softmax a head, a lane a row; for P V a simdgroup takes D / SIMDGROUPS columns of
// all rows, so that nothing is merged at the end.
//
// Blocks: general (BLOCK_ROWS = 0), the length is divided evenly among the blocks, so that all of them work at any
// length; fixed, block b has the rows from b BLOCK_ROWS on. A block past the length writes neutral sums. No row past
// the length is read.
//
// Limits: D a multiple of 32 and of 16 SIMDGROUPS.
//
// Why matrix units lose nothing here: their tiles have 16 rows and a KV head has 8 query heads or fewer. The other half
// holds what is left of q, and of the weights, after rounding to 16 bits: with high and low parts the products are those
// of fp32 numbers of 16 (bfloat16) or 22 (float16) bits, and keys and values are exact.

#include "common/gates.h"

template <typename KvT, int D, int SIMDGROUPS>
struct AttentionDecodeTile {
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
    SCORES_SIZE = SPLITS * 16 * SCORE_STRIDE
  };
  static_assert(D % 32 == 0 && D % (16 * SIMDGROUPS) == 0, "simdgroups have whole tiles of columns");
  static_assert(KV_SIZE * int(sizeof(KvT)) >= 16 * D * 4, "the sums fit where the values were");
};

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
    if (chunk < Tile::CHUNKS && row < end) {
      staged[i] = lily_load<UNIT>(source + i64(row) * D + chunk % (D / UNIT) * UNIT);
    } else {
      const f32 zeros[UNIT] = {};
      staged[i] = lily_pack<KvT, UNIT>(zeros);
    }
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

template <
    typename QT, typename KvT, typename OutT, int Hk, int GROUP, int D, int SIMDGROUPS, int BLOCK_ROWS,
    int GATE_OFFSET, int GATE_STRIDE, bool FINAL>
LILY_INLINE void attention_decode(
    LILY_DEVICE const QT* q,
    LILY_DEVICE const KvT* keys,
    LILY_DEVICE const KvT* values,
    LILY_DEVICE const i32* position,
    LILY_DEVICE const KvT* projected,
    LILY_DEVICE OutT* out,
    LILY_THREADGROUP KvT* memory,    // q, kv and weights, one after another
    LILY_THREADGROUP f32* scores,    // [SPLITS, 16, SCORE_STRIDE]
    LILY_THREADGROUP f32* of_heads,  // [HEADS]: factor of the sums so far; then of the result
    uint heads_index,                // KV head and which 8 of its query heads
    uint block,
    uint blocks,
    uint thread_index,
    uint simdgroup,
    uint lane) {
  using Tile = AttentionDecodeTile<KvT, D, SIMDGROUPS>;
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

  LILY_THREADGROUP KvT* queries = memory;
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
      if (lane == 0) {
        of_heads[head] = FINAL ? 1.0f / sum : 1.0f;
      }
      if (!FINAL && lane == 0 && head < heads) {
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
      const int head = i / D;
      f32 columns[4];
      f32 low[4] = {};
      lily_unpack(lily_load<4>(rows + i), columns);
      if (Tile::HAS_LOW) {
        lily_unpack(lily_load<4>(rows + i + HEADS * D), low);
      }
      LILY_UNROLL
      for (int c = 0; c < 4; ++c) {
        columns[c] += low[c];
        if constexpr (FINAL) {
          const f32 gate = lily_to_f32(projected[GATE_OFFSET + (first_head + head) * GATE_STRIDE + i % D + c]);
          columns[c] *= of_heads[head] * lily_sigmoid(gate);
        }
      }
      lily_store<4>(out + i, lily_pack<OutT, 4>(columns));
    }
  }
}

// ---- body ----
using Tile = AttentionDecodeTile<KvT, D, SIMDGROUPS>;
LILY_THREADGROUP_ARRAY(KvT, memory, Tile::Q_SIZE + Tile::KV_SIZE + Tile::WEIGHTS_SIZE);
LILY_THREADGROUP_ARRAY(f32, scores, Tile::SCORES_SIZE);
LILY_THREADGROUP_ARRAY(f32, of_heads, Tile::HEADS);
attention_decode<QT, KvT, OutT, Hk, GROUP, D, SIMDGROUPS, BLOCK_ROWS, GATE_OFFSET, GATE_STRIDE, FINAL>(
    q, keys, values, position, reinterpret_cast<LILY_DEVICE const KvT*>(projected), out, memory, scores, of_heads,
    threadgroup_position_in_grid.x, threadgroup_position_in_grid.y, threadgroups_per_grid.y,
    thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
