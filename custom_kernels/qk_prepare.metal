// Queries, keys and values of one token, ready for attention and for the cache.
//
//   q = rope(rmsnorm(q_raw) * q_weight),  k = rope(rmsnorm(k_raw) * k_weight),  v = v_raw
//
//   q_raw        [*]            InT   from element Q_OFFSET: Hq heads of D query elements, then D of the output gate
//   k_raw        [*]            InT   Hk heads of D from K_OFFSET
//   v_raw        [*]            InT   Hk heads of D from V_OFFSET
//   q_weight     [D]            InT
//   k_weight     [D]            InT
//   frequencies  [*]            f32   ROTARY / 2, radians a position
//   position     [8]            i32   position[0]: this token's, counted from 0
//   q            [1, Hq, 1, D]  f32
//   k            [1, Hk, 1, D]  InT
//   v            [1, Hk, 1, D]  InT   v_raw, bit for bit
//
// The first ROTARY elements of a head are rotated, element i with element i + ROTARY / 2. The three inputs may be one
// buffer. The output gate stays where it is: the last pass of attention reads it there.
//
// Who owns what: a threadgroup is one simdgroup and owns one head of q, k or v; a lane owns D / 32 elements in runs of
// UNIT, and for the rotation the pairs lane, lane + 32, ...
//
// Limits: D a multiple of 32, ROTARY even and at most D, the offsets multiples of UNIT.
//
// Why q is fp32: it is read once, by attention, and 16 KB more cost nothing; rounding it is what would cost.

#include "common/rope.h"

template <
    typename InT, int Hq, int Hk, int D, int ROTARY, int Q_OFFSET, int K_OFFSET, int V_OFFSET, int EPS_BITS>
struct QkPrepare {
  static_assert(D % 32 == 0, "D is a multiple of 32");
  static_assert(ROTARY % 2 == 0 && ROTARY <= D, "ROTARY is even and at most D");
  enum : int {
    COLUMNS_PER_LANE = D / 32,
    UNIT = COLUMNS_PER_LANE % 8 == 0 ? 8 : COLUMNS_PER_LANE % 4 == 0 ? 4 : COLUMNS_PER_LANE % 2 == 0 ? 2 : 1,
    RUNS = COLUMNS_PER_LANE / UNIT,
    PAIRS = ROTARY / 2,
    PAIRS_PER_LANE = (PAIRS + 31) / 32
  };
  static_assert(Q_OFFSET % UNIT == 0 && K_OFFSET % UNIT == 0 && V_OFFSET % UNIT == 0, "heads start at whole loads");

  static LILY_INLINE void copy(LILY_DEVICE const InT* source, LILY_DEVICE InT* target, uint lane) {
    LILY_UNROLL
    for (int r = 0; r < RUNS; ++r) {
      const int column = (r * 32 + int(lane)) * UNIT;
      lily_store<UNIT>(target + column, lily_load<UNIT>(source + column));
    }
  }

  template <typename OutT>
  static LILY_INLINE void prepare(
      LILY_DEVICE const InT* source,
      LILY_DEVICE const InT* weight,
      LILY_DEVICE const f32* frequencies,
      i32 position,
      LILY_DEVICE OutT* target,
      LILY_THREADGROUP f32* row,  // [D]
      uint lane) {
    f32 x[COLUMNS_PER_LANE];
    f32 scale[COLUMNS_PER_LANE];
    LILY_UNROLL
    for (int r = 0; r < RUNS; ++r) {
      const int column = (r * 32 + int(lane)) * UNIT;
      lily_unpack(lily_load<UNIT>(source + column), x + r * UNIT);
      lily_unpack(lily_load<UNIT>(weight + column), scale + r * UNIT);
    }
    // The rotations need no data of the head, so they are computed while it is on its way.
    lily_rotation rotations[PAIRS_PER_LANE == 0 ? 1 : PAIRS_PER_LANE];
    LILY_UNROLL
    for (int i = 0; i < PAIRS_PER_LANE; ++i) {
      const int pair = i * 32 + int(lane);
      rotations[i] = lily_rotation_at(position, pair < PAIRS ? frequencies[pair] : 0.0f);
    }
    f32 squares = 0.0f;
    LILY_UNROLL
    for (int c = 0; c < COLUMNS_PER_LANE; ++c) {
      squares = lily_fma(x[c], x[c], squares);
    }
    const f32 norm = lily_rsqrt(lily_simd_sum(squares) / f32(D) + lily_f32_from_bits(u32(EPS_BITS)));
    LILY_UNROLL
    for (int r = 0; r < RUNS; ++r) {
      LILY_UNROLL
      for (int c = 0; c < UNIT; ++c) {
        row[(r * 32 + int(lane)) * UNIT + c] = x[r * UNIT + c] * norm * scale[r * UNIT + c];
      }
    }
    lily_simdgroup_barrier();
    LILY_UNROLL
    for (int i = 0; i < PAIRS_PER_LANE; ++i) {
      const int pair = i * 32 + int(lane);
      if (pair < PAIRS) {
        const f32 first = row[pair];
        const f32 second = row[pair + PAIRS];
        row[pair] = rotations[i].first(first, second);
        row[pair + PAIRS] = rotations[i].second(second, first);
      }
    }
    lily_simdgroup_barrier();
    LILY_UNROLL
    for (int r = 0; r < RUNS; ++r) {
      const int column = (r * 32 + int(lane)) * UNIT;
      f32 values[UNIT];
      LILY_UNROLL
      for (int c = 0; c < UNIT; ++c) {
        values[c] = row[column + c];
      }
      lily_store<UNIT>(target + column, lily_pack<OutT, UNIT>(values));
    }
  }
};

template <
    typename InT, int Hq, int Hk, int D, int ROTARY, int Q_OFFSET, int K_OFFSET, int V_OFFSET, int EPS_BITS>
LILY_INLINE void qk_prepare(
    LILY_DEVICE const InT* q_raw,
    LILY_DEVICE const InT* k_raw,
    LILY_DEVICE const InT* v_raw,
    LILY_DEVICE const InT* q_weight,
    LILY_DEVICE const InT* k_weight,
    LILY_DEVICE const f32* frequencies,
    LILY_DEVICE const i32* position,
    LILY_DEVICE f32* q,
    LILY_DEVICE InT* k,
    LILY_DEVICE InT* v,
    LILY_THREADGROUP f32* row,
    uint group,  // heads of q, then of k, then of v
    uint lane) {
  using Prepare = QkPrepare<InT, Hq, Hk, D, ROTARY, Q_OFFSET, K_OFFSET, V_OFFSET, EPS_BITS>;
  const int head = int(group);
  const int kv_head = (head - Hq) % Hk;
  if (head < Hq) {
    Prepare::prepare(
        q_raw + Q_OFFSET + head * (2 * D), q_weight, frequencies, position[0], q + head * D, row, lane);
  } else if (head < Hq + Hk) {
    Prepare::prepare(k_raw + K_OFFSET + kv_head * D, k_weight, frequencies, position[0], k + kv_head * D, row, lane);
  } else {
    Prepare::copy(v_raw + V_OFFSET + kv_head * D, v + kv_head * D, lane);
  }
}

// ---- body ----
LILY_THREADGROUP_ARRAY(f32, row, D);
qk_prepare<InT, Hq, Hk, D, ROTARY, Q_OFFSET, K_OFFSET, V_OFFSET, EPS_BITS>(
    q_raw, k_raw, v_raw, q_weight, k_weight, frequencies, position, q, k, v, row,
    threadgroup_position_in_grid.x, thread_index_in_simdgroup);
