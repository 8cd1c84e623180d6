// Attention of one token over the KV cache, each threadgroup over a block of rows.
//
//   out = softmax(q K^T / sqrt(D)) V          over the rows 0 .. length - 1, length = position[0] + 1
//
//   q            [1, Hq, 1, D]        QT
//   keys, values [1, Hk, capacity, D] KvT
//   projected    [*]                  KvT   the output gate of head h is D elements at GATE_OFFSET + h GATE_STRIDE;
//                                           read only if FINAL
//   position     [8]                  i32   position[0]: this token's, whose row is in the cache already
//   sizes        [8]                  i32   sizes[0]: capacity
//   out          [*]                  OutT  not FINAL: [BLOCKS, Hq, D] f32, sums over a block, not divided yet
//                                           FINAL:     [1, 1, Hq D], divided and times sigmoid(gate)
//   stats        [BLOCKS, Hq, 2]      f32   of each block: largest score in bits (log2), sum of 2^(score - largest)
//
// Query head h reads KV head h / GROUP. BLOCKS is the grid's y; FINAL needs BLOCKS = 1.
//
// Who owns what: a threadgroup owns PARTS x HEADS query heads of one KV head and a block of rows; a simdgroup owns
// HEADS of the heads and every SETS-th tile of ROWS 32 / LANES rows. LANES lanes share a row, lane l its elements
// (r LANES + l) UNIT .. + UNIT - 1 of each run r, so a load of the simdgroup is 32 / LANES whole rows one after another,
// and each element read serves HEADS query heads. In the softmax a lane has one score of the tile: of the row
// i (32 / LANES) + lane / LANES and the head h, where i HEADS + h = l / OWNERS; OWNERS lanes have the same one.
//
// Blocks: general (BLOCK_ROWS = 0), the length is divided evenly among the blocks, so that all of them work at any
// length; fixed, block b has the rows from b BLOCK_ROWS on. A block past the length writes neutral sums. No row past
// the length is read.
//
// Limits: D a multiple of 32, of LANES UNIT; ROWS HEADS a power of two up to LANES; GROUP a multiple of PARTS HEADS.
//
// Why this order: the scores of a tile are up to 32 sums over 32 lanes. Added one by one they would take 160
// shuffles; folded, so that each step halves the sums that a lane holds, they take 31 and leave each lane with its
// own. The rows of the next tile are requested as soon as the registers of this one are free, so loads are in flight
// all the time; q is read from threadgroup memory again for each tile unless Q_IN_REGISTERS.

#include "common/gates.h"

template <
    typename QT, typename KvT, typename OutT, int Hk, int GROUP, int D, int HEADS, int PARTS, int SETS, int LANES,
    int ROWS, int BLOCK_ROWS, int GATE_OFFSET, int GATE_STRIDE, bool Q_IN_REGISTERS, bool FINAL>
struct AttentionDecode {
  enum : int {
    UNIT = D % 64 == 0 ? 8 : 4,
    COLUMNS = D / LANES,
    RUNS = COLUMNS / UNIT,
    ROWS_AT_ONCE = 32 / LANES,
    TILE_ROWS = ROWS * ROWS_AT_ONCE,
    SCORES = ROWS * HEADS,    // that LANES lanes compute together
    OWNERS = LANES / SCORES,  // neighbouring lanes that end up with the same score
    SIMDGROUPS = PARTS * SETS,
    THREADS = SIMDGROUPS * 32,
    P_UNIT = HEADS < 4 ? HEADS : 4,
    // Heads of each part that are merged at a time: 16 KB for all simdgroups.
    MERGE_FIT = 4096 / (SIMDGROUPS * D),
    MERGE_HEADS = MERGE_FIT >= HEADS ? HEADS : MERGE_FIT >= 4 ? 4 : MERGE_FIT >= 2 ? 2 : 1
  };
  static_assert(D % 32 == 0 && D % (LANES * UNIT) == 0, "a row is whole loads");
  static_assert(32 % LANES == 0 && LANES % (ROWS * HEADS) == 0, "ROWS HEADS divides LANES, LANES divides 32");
  static_assert(GROUP % (HEADS * PARTS) == 0, "threadgroups have whole parts of a group");
  static_assert(MERGE_FIT >= 1, "the sums of one head of all simdgroups fit into 16 KB");

  // Stands for minus infinity: differences of it stay finite.
  static LILY_INLINE f32 lowest() {
    return -1e30f;
  }

  struct Tile {
    lily_vec<KvT, UNIT> keys[ROWS][RUNS];
    lily_vec<KvT, UNIT> values[ROWS][RUNS];
  };

  LILY_DEVICE const KvT* keys;  // at this lane's row and column
  LILY_DEVICE const KvT* values;
  LILY_THREADGROUP const f32* q_shared;  // of this part: [HEADS, RUNS, UNIT / 4, LANES, 4]
  LILY_THREADGROUP f32* weights;         // [32] of this simdgroup
  int end;                               // of the block
  int lane_in_row;
  int row_of_lane;  // of the rows that are loaded at once

  f32 q[Q_IN_REGISTERS ? HEADS : 1][COLUMNS];
  f32 sums[HEADS][COLUMNS];
  f32 largest;  // of this lane's head, in this simdgroup
  f32 total;    // of this lane's scores
  Tile tile;

  LILY_INLINE void load(
      LILY_DEVICE const KvT* source, LILY_THREAD lily_vec<KvT, UNIT> (*rows)[RUNS], int tile_row) {
    LILY_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      const int row = tile_row + i * ROWS_AT_ONCE;
      const bool exists = row + row_of_lane < end;
      LILY_UNROLL
      for (int r = 0; r < RUNS; ++r) {
        if (exists) {
          rows[i][r] = lily_load<UNIT>(source + i64(row) * D + r * (LANES * UNIT));
        } else {
          const f32 zeros[UNIT] = {};
          rows[i][r] = lily_pack<KvT, UNIT>(zeros);
        }
      }
    }
  }

  // Four elements of q of a head, from this lane's c-th on.
  LILY_INLINE void read_q(int head, int c, LILY_THREAD f32* columns) {
    lily_unpack(lily_load<4>(q_shared + ((head * COLUMNS + c) * LANES + lane_in_row * 4)), columns);
  }

  // Sums over the lanes of a row of each of COUNT values: half of them go to the lane WIDTH / 2 away, until a lane has
  // one; then the lanes that are left add theirs. Value i ends up in the lanes from i WIDTH / COUNT on.
  template <int COUNT, int WIDTH>
  LILY_INLINE void fold(LILY_THREAD f32* partial) {
    if constexpr (COUNT > 1) {
      const bool upper = (lane_in_row & (WIDTH / 2)) != 0;
      LILY_UNROLL
      for (int i = 0; i < COUNT / 2; ++i) {
        const f32 give = upper ? partial[i] : partial[i + COUNT / 2];
        const f32 keep = upper ? partial[i + COUNT / 2] : partial[i];
        partial[i] = keep + lily_shuffle_xor(give, u32(WIDTH / 2));
      }
      fold<COUNT / 2, WIDTH / 2>(partial);
    } else if constexpr (WIDTH > 1) {
      partial[0] += lily_shuffle_xor(partial[0], u32(WIDTH / 2));
      fold<1, WIDTH / 2>(partial);
    }
  }

  // This lane's score of the tile.
  LILY_INLINE f32 score() {
    f32 partial[SCORES];
    LILY_UNROLL
    for (int i = 0; i < SCORES; ++i) {
      partial[i] = 0.0f;
    }
    LILY_UNROLL
    for (int c = 0; c < COLUMNS; c += 4) {
      f32 k[ROWS][UNIT];
      LILY_UNROLL
      for (int i = 0; i < ROWS; ++i) {
        lily_unpack(tile.keys[i][c / UNIT], k[i]);
      }
      LILY_UNROLL
      for (int h = 0; h < HEADS; ++h) {
        f32 q_columns[4];
        if constexpr (Q_IN_REGISTERS) {
          LILY_UNROLL
          for (int j = 0; j < 4; ++j) {
            q_columns[j] = q[h][c + j];
          }
        } else {
          read_q(h, c, q_columns);
        }
        LILY_UNROLL
        for (int i = 0; i < ROWS; ++i) {
          LILY_UNROLL
          for (int j = 0; j < 4; ++j) {
            partial[i * HEADS + h] = lily_fma(q_columns[j], k[i][c % UNIT + j], partial[i * HEADS + h]);
          }
        }
      }
    }
    fold<SCORES, LANES>(partial);
    return partial[0];
  }

  // The tile at tile_row; then the rows of the tile at next_row, if there is one, take its registers.
  LILY_INLINE void step(int tile_row, int next_row) {
    const f32 value = score();
    if (next_row < end) {
      load(keys, tile.keys, next_row);
    }
    const int index = lane_in_row / OWNERS;  // of this lane's score
    const bool exists = tile_row + index / HEADS * ROWS_AT_ONCE + row_of_lane < end;
    f32 new_largest = lily_max(largest, exists ? value : lowest());
    LILY_UNROLL
    for (int mask = OWNERS * HEADS; mask < 32; mask *= 2) {
      new_largest = lily_max(new_largest, lily_shuffle_xor(new_largest, u32(mask)));
    }
    const f32 weight = exists ? lily_fast_exp2(value - new_largest) : 0.0f;
    const bool rescales = new_largest > largest;
    if (lily_simd_any(rescales)) {
      const f32 scale = lily_fast_exp2(largest - new_largest);
      largest = new_largest;
      total *= scale;
      LILY_UNROLL
      for (int h = 0; h < HEADS; ++h) {
        const f32 scale_of_head = lily_shuffle(scale, u32(h * OWNERS));
        LILY_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
          sums[h][c] *= scale_of_head;
        }
      }
    }
    total += weight;
    if (lane_in_row % OWNERS == 0) {
      weights[row_of_lane * SCORES + index] = weight;
    }
    lily_simdgroup_barrier();
    LILY_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      f32 v[COLUMNS];
      f32 of_head[HEADS];
      LILY_UNROLL
      for (int r = 0; r < RUNS; ++r) {
        lily_unpack(tile.values[i][r], v + r * UNIT);
      }
      LILY_UNROLL
      for (int h = 0; h < HEADS; h += P_UNIT) {
        lily_unpack(lily_load<P_UNIT>(weights + row_of_lane * SCORES + i * HEADS + h), of_head + h);
      }
      LILY_UNROLL
      for (int h = 0; h < HEADS; ++h) {
        LILY_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
          sums[h][c] = lily_fma(of_head[h], v[c], sums[h][c]);
        }
      }
    }
    if (next_row < end) {
      load(values, tile.values, next_row);
    }
    lily_simdgroup_barrier();  // the weights are read before the next tile's are written
  }

  // Rows begin .. end - 1, every SETS-th tile from the set's first.
  LILY_INLINE void run(int begin, int set) {
    if constexpr (Q_IN_REGISTERS) {
      LILY_UNROLL
      for (int h = 0; h < HEADS; ++h) {
        LILY_UNROLL
        for (int c = 0; c < COLUMNS; c += 4) {
          read_q(h, c, q[h] + c);
        }
      }
    }
    LILY_UNROLL
    for (int h = 0; h < HEADS; ++h) {
      LILY_UNROLL
      for (int c = 0; c < COLUMNS; ++c) {
        sums[h][c] = 0.0f;
      }
    }
    largest = lowest();
    total = 0.0f;
    int row = begin + set * TILE_ROWS;
    LILY_NO_UNROLL
    for (; row < end; row += SETS * TILE_ROWS) {
      step(row, row + SETS * TILE_ROWS);
    }
    // Lanes of different rows, and of different rows at once, have their own sums.
    LILY_UNROLL
    for (int mask = OWNERS * HEADS; mask < 32; mask *= 2) {
      total += lily_shuffle_xor(total, u32(mask));
    }
    LILY_UNROLL
    for (int mask = LANES; mask < 32; mask *= 2) {
      LILY_UNROLL
      for (int h = 0; h < HEADS; ++h) {
        LILY_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
          sums[h][c] += lily_shuffle_xor(sums[h][c], u32(mask));
        }
      }
    }
  }
};

template <
    typename QT, typename KvT, typename OutT, int Hk, int GROUP, int D, int HEADS, int PARTS, int SETS, int LANES,
    int ROWS, int BLOCK_ROWS, int GATE_OFFSET, int GATE_STRIDE, bool Q_IN_REGISTERS, bool FINAL>
LILY_INLINE void attention_decode(
    LILY_DEVICE const QT* q,
    LILY_DEVICE const KvT* keys,
    LILY_DEVICE const KvT* values,
    LILY_DEVICE const KvT* projected,
    LILY_DEVICE const i32* position,
    LILY_DEVICE const i32* sizes,
    LILY_DEVICE OutT* out,
    LILY_DEVICE f32* stats,
    LILY_THREADGROUP f32* q_shared,     // [PARTS, HEADS, D], permuted
    LILY_THREADGROUP f32* weights,      // [SIMDGROUPS, 32]
    LILY_THREADGROUP f32* group_stats,  // [SIMDGROUPS, HEADS, 2]
    LILY_THREADGROUP f32* merged,       // [SIMDGROUPS, MERGE_HEADS, D]
    uint heads_index,                   // KV head and which of its threadgroups
    uint block,
    uint blocks,
    uint thread_index,
    uint simdgroup,
    uint lane) {
  using Attention = AttentionDecode<
      QT, KvT, OutT, Hk, GROUP, D, HEADS, PARTS, SETS, LANES, ROWS, BLOCK_ROWS, GATE_OFFSET, GATE_STRIDE,
      Q_IN_REGISTERS, FINAL>;
  constexpr int UNIT = Attention::UNIT;
  constexpr int RUNS = Attention::RUNS;
  constexpr int OWNERS = Attention::OWNERS;
  constexpr int THREADS = Attention::THREADS;
  constexpr int MERGE_HEADS = Attention::MERGE_HEADS;
  constexpr int THREADGROUPS_PER_KV_HEAD = GROUP / (HEADS * PARTS);
  constexpr int Hq = Hk * GROUP;

  const int length = position[0] + 1;
  const int capacity = sizes[0];
  const int kv_head = int(heads_index) / THREADGROUPS_PER_KV_HEAD;
  const int first_head = kv_head * GROUP + int(heads_index) % THREADGROUPS_PER_KV_HEAD * (HEADS * PARTS);
  const int part = int(simdgroup) % PARTS;
  const int set = int(simdgroup) / PARTS;
  const int lane_in_row = int(lane) % LANES;
  const int tiles = (length + Attention::TILE_ROWS - 1) / Attention::TILE_ROWS;
  const int block_rows =
      BLOCK_ROWS > 0 ? BLOCK_ROWS : (tiles + int(blocks) - 1) / int(blocks) * Attention::TILE_ROWS;
  const int begin = int(block) * block_rows;

  Attention attention;
  attention.end = lily_min(begin + block_rows, length);
  attention.lane_in_row = lane_in_row;
  attention.row_of_lane = int(lane) / LANES;
  attention.q_shared = q_shared + part * (HEADS * D);
  attention.weights = weights + simdgroup * 32;
  const i64 offset = (i64(kv_head) * capacity + attention.row_of_lane) * D + lane_in_row * UNIT;
  attention.keys = keys + offset;
  attention.values = values + offset;
  const int first_row = begin + set * Attention::TILE_ROWS;
  attention.load(attention.keys, attention.tile.keys, first_row);
  attention.load(attention.values, attention.tile.values, first_row);

  // Scores are in bits, so that their exponential is exp2.
  const f32 scale = lily_rsqrt(f32(D)) * 1.4426950408889634f;
  for (int i = int(thread_index); i < PARTS * HEADS * D; i += THREADS) {
    const int column = i % D;
    const int run = column / (LANES * UNIT);
    const int of_lane = column % (LANES * UNIT) / UNIT;
    const int word = (run * UNIT + column % UNIT) / 4;
    q_shared[i / D * D + (word * LANES + of_lane) * 4 + column % 4] =
        lily_to_f32(q[first_head * D + i]) * scale;
  }
  lily_threadgroup_barrier();
  attention.run(begin, set);

  LILY_THREADGROUP f32* own_stats = group_stats + simdgroup * (HEADS * 2);
  const int head_of_lane = lane_in_row / OWNERS % HEADS;
  const bool has_stats = int(lane) < OWNERS * HEADS && int(lane) % OWNERS == 0;
  if (has_stats) {
    own_stats[head_of_lane * 2] = attention.largest;
    own_stats[head_of_lane * 2 + 1] = attention.total;
  }
  lily_threadgroup_barrier();
  // A lane has the figures of its head over all sets.
  f32 largest = Attention::lowest();
  f32 total = 0.0f;
  LILY_UNROLL
  for (int s = 0; s < SETS; ++s) {
    largest = lily_max(largest, group_stats[((s * PARTS + part) * HEADS + head_of_lane) * 2]);
  }
  LILY_UNROLL
  for (int s = 0; s < SETS; ++s) {
    LILY_THREADGROUP const f32* of_set = group_stats + ((s * PARTS + part) * HEADS + head_of_lane) * 2;
    total += of_set[1] * lily_fast_exp2(of_set[0] - largest);
  }
  if (set == 0 && has_stats) {
    LILY_DEVICE f32* target = stats + (i64(block) * Hq + first_head + part * HEADS + head_of_lane) * 2;
    target[0] = largest;
    target[1] = total;
  }
  const f32 rescale = lily_fast_exp2(attention.largest - largest) * (FINAL ? 1.0f / total : 1.0f);

  LILY_UNROLL
  for (int first = 0; first < HEADS; first += MERGE_HEADS) {
    LILY_UNROLL
    for (int m = 0; m < MERGE_HEADS; ++m) {
      const int h = first + m;
      const f32 rescale_of_head = lily_shuffle(rescale, u32(h * OWNERS));
      if (attention.row_of_lane == 0) {
        LILY_UNROLL
        for (int r = 0; r < RUNS; ++r) {
          f32 scaled[UNIT];
          LILY_UNROLL
          for (int c = 0; c < UNIT; ++c) {
            scaled[c] = attention.sums[h][r * UNIT + c] * rescale_of_head;
          }
          lily_store<UNIT>(
              merged + (int(simdgroup) * MERGE_HEADS + m) * D + (r * LANES + lane_in_row) * UNIT,
              lily_pack<f32, UNIT>(scaled));
        }
      }
    }
    lily_threadgroup_barrier();
    for (int i = int(thread_index); i < PARTS * MERGE_HEADS * D; i += THREADS) {
      f32 sum = 0.0f;
      LILY_UNROLL
      for (int s = 0; s < SETS; ++s) {
        sum += merged[s * (PARTS * MERGE_HEADS * D) + i];
      }
      const int head = first_head + i / (MERGE_HEADS * D) * HEADS + first + i / D % MERGE_HEADS;
      if (FINAL) {
        sum *= lily_sigmoid(lily_to_f32(projected[GATE_OFFSET + head * GATE_STRIDE + i % D]));
      }
      out[(i64(block) * Hq + head) * D + i % D] = lily_from_f32<OutT>(sum);
    }
    lily_threadgroup_barrier();
  }
}

// ---- body ----
using Attention = AttentionDecode<
    QT, KvT, OutT, Hk, GROUP, D, HEADS, PARTS, SETS, LANES, ROWS, BLOCK_ROWS, GATE_OFFSET, GATE_STRIDE,
    Q_IN_REGISTERS, FINAL>;
LILY_THREADGROUP_ARRAY(f32, q_shared, PARTS * HEADS * D);
LILY_THREADGROUP_ARRAY(f32, weights, PARTS * SETS * 32);
LILY_THREADGROUP_ARRAY(f32, group_stats, PARTS * SETS * HEADS * 2);
LILY_THREADGROUP_ARRAY(f32, merged, PARTS * SETS * Attention::MERGE_HEADS * D);
attention_decode<
    QT, KvT, OutT, Hk, GROUP, D, HEADS, PARTS, SETS, LANES, ROWS, BLOCK_ROWS, GATE_OFFSET, GATE_STRIDE,
    Q_IN_REGISTERS, FINAL>(
    q, keys, values, projected, position, sizes, out, stats, q_shared, weights, group_stats, merged,
    threadgroup_position_in_grid.x, threadgroup_position_in_grid.y, threadgroups_per_grid.y,
    thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
