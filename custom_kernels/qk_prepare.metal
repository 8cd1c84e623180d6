// Queries, keys and values of a sequence of tokens, ready for attention and for the cache.
//
//   q = rope(rmsnorm(q_raw) * q_weight),  k = rope(rmsnorm(k_raw) * k_weight),  v = v_raw
//
//   projected    [B, T, COLUMNS] InT  q_raw, Hq heads from column Q_OFFSET: D of the query, then D of the output gate;
//                                     k_raw, Hk heads of D from K_OFFSET; v_raw likewise from V_OFFSET
//   q_weight     [D]            InT
//   k_weight     [D]            InT
//   frequencies  [*]            f32   ROTARY / 2, radians a position
//   position     [*]            i32   position[b]: of the first token of batch row b, counted from 0
//   sizes        [8]            i32   sizes[0] = T, sizes[1] = B T; absent if B T = 1
//   k_before, v_before [1, Hk, 2, D] InT  HAS_BEFORE, B T = 1: rows of the cache; the second comes first in k and v
//   q            [B, Hq, T, D]  QT
//   k            [B, Hk, T, D]  InT   HAS_BEFORE: [1, Hk, 2, D]
//   v            as k           InT   v_raw, bit for bit
//
// The first ROTARY elements of a head are rotated, element i with element i + ROTARY / 2. The output gate stays where
// it is: what follows attention reads it there.
//
// Who owns what: a simdgroup owns HEADS neighbouring heads of one token, counted through those of q, of k and of v; a lane
// owns D / 32 elements of each in runs of UNIT, and for the rotation the pairs lane, lane + 32, ... of every head, whose
// rotations are the same. The elements that are rotated are exchanged through threadgroup memory, the others stay in
// registers. Simdgroups share nothing.
//
// Limits: D a multiple of 32, ROTARY even and at most D, offsets and columns multiples of UNIT.
//
// Why QT: one token's q is read once, and rounding it is what would cost, so it is fp32; a prompt's q is the operand of a
// matrix product in the activation type.

#include "common/rope.h"

template <
    typename InT, typename QT, int Hq, int Hk, int D, int ROTARY, int COLUMNS, int Q_OFFSET, int K_OFFSET, int V_OFFSET,
    int EPS_BITS, int HEADS>
struct QkPrepare {
  static_assert(D % 32 == 0, "D is a multiple of 32");
  static_assert(ROTARY > 0 && ROTARY % 2 == 0 && ROTARY <= D, "ROTARY is even and at most D");
  enum : int {
    COLUMNS_PER_LANE = D / 32,
    UNIT = COLUMNS_PER_LANE % 8 == 0 ? 8 : COLUMNS_PER_LANE % 4 == 0 ? 4 : COLUMNS_PER_LANE % 2 == 0 ? 2 : 1,
    RUNS = COLUMNS_PER_LANE / UNIT,
    PAIRS = ROTARY / 2,
    PAIRS_PER_LANE = (PAIRS + 31) / 32,
    ROTATED = (ROTARY + 7) / 8 * 8,  // elements of a head that are exchanged: whole runs
    ALL_HEADS = Hq + 2 * Hk,
    SIMDGROUPS_PER_TOKEN = (ALL_HEADS + HEADS - 1) / HEADS
  };
  static_assert(Q_OFFSET % UNIT == 0 && K_OFFSET % UNIT == 0 && V_OFFSET % UNIT == 0, "heads start at whole loads");
  static_assert(COLUMNS % UNIT == 0, "tokens too");

  static LILY_INLINE int column(int run, uint lane) {
    return (run * 32 + int(lane)) * UNIT;
  }

  template <typename T>
  static LILY_INLINE void store(LILY_DEVICE T* target, LILY_THREAD const f32* x, uint lane) {
    LILY_UNROLL
    for (int r = 0; r < RUNS; ++r) {
      lily_store<UNIT>(target + column(r, lane), lily_pack<T, UNIT>(x + r * UNIT));
    }
  }

  // x * rsqrt(mean(x^2) + eps) * weight, in place; what is to be rotated also goes to shared.
  static LILY_INLINE void normalise(
      LILY_THREAD f32* x, LILY_DEVICE const InT* weight, LILY_THREADGROUP f32* shared, uint lane) {
    f32 squares = 0.0f;
    LILY_UNROLL
    for (int c = 0; c < COLUMNS_PER_LANE; ++c) {
      squares = lily_fma(x[c], x[c], squares);
    }
    const f32 norm = lily_rsqrt(lily_simd_sum(squares) / f32(D) + lily_f32_from_bits(u32(EPS_BITS)));
    LILY_UNROLL
    for (int r = 0; r < RUNS; ++r) {
      f32 scale[UNIT];
      lily_unpack(lily_load<UNIT>(weight + column(r, lane)), scale);
      LILY_UNROLL
      for (int c = 0; c < UNIT; ++c) {
        x[r * UNIT + c] = x[r * UNIT + c] * norm * scale[c];
      }
      if (column(r, lane) < ROTATED) {
        lily_store<UNIT>(shared + column(r, lane), lily_pack<f32, UNIT>(x + r * UNIT));
      }
    }
  }

  static LILY_INLINE void reload(LILY_THREADGROUP const f32* shared, LILY_THREAD f32* x, uint lane) {
    LILY_UNROLL
    for (int r = 0; r < RUNS; ++r) {
      if (column(r, lane) < ROTATED) {
        lily_unpack(lily_load<UNIT>(shared + column(r, lane)), x + r * UNIT);
      }
    }
  }
};

template <
    typename InT, typename QT, int Hq, int Hk, int D, int ROTARY, int COLUMNS, int Q_OFFSET, int K_OFFSET, int V_OFFSET,
    int EPS_BITS, bool ONE_TOKEN, bool HAS_BEFORE, int HEADS, int SIMDGROUPS, typename SizeT, typename BeforeT>
LILY_INLINE void qk_prepare(
    LILY_DEVICE const InT* projected,
    LILY_DEVICE const InT* q_weight,
    LILY_DEVICE const InT* k_weight,
    LILY_DEVICE const f32* frequencies,
    LILY_DEVICE const i32* position,
    LILY_DEVICE const SizeT* sizes,
    LILY_DEVICE const BeforeT* k_before,
    LILY_DEVICE const BeforeT* v_before,
    LILY_DEVICE QT* q,
    LILY_DEVICE InT* k,
    LILY_DEVICE InT* v,
    LILY_THREADGROUP f32* shared,  // [SIMDGROUPS, HEADS, ROTATED]
    uint group,
    uint simdgroup,
    uint lane) {
  static_assert(ONE_TOKEN || !HAS_BEFORE, "only one token has a row before it");
  using Prepare = QkPrepare<InT, QT, Hq, Hk, D, ROTARY, COLUMNS, Q_OFFSET, K_OFFSET, V_OFFSET, EPS_BITS, HEADS>;
  constexpr int UNIT = Prepare::UNIT;
  int T = 1;
  int tokens = 1;
  if constexpr (!ONE_TOKEN) {
    T = sizes[0];
    tokens = sizes[1];
  }
  const int index = int(group) * SIMDGROUPS + int(simdgroup);
  const int token = index / Prepare::SIMDGROUPS_PER_TOKEN;
  if (token >= tokens) {
    return;  // the simdgroups of the last threadgroup that have no token
  }
  const int first = index % Prepare::SIMDGROUPS_PER_TOKEN * HEADS;
  const int row = token / T;
  const int t = token % T;
  shared += int(simdgroup) * (HEADS * Prepare::ROTATED);

  lily_vec<InT, UNIT> words[HEADS][Prepare::RUNS];
  LILY_UNROLL
  for (int i = 0; i < HEADS; ++i) {
    const int head = lily_min(first + i, int(Prepare::ALL_HEADS) - 1);
    const int start = head < Hq ? Q_OFFSET + head * (2 * D)
        : head < Hq + Hk        ? K_OFFSET + (head - Hq) * D
                                : V_OFFSET + (head - Hq - Hk) * D;
    LILY_DEVICE const InT* source = projected + i64(token) * COLUMNS + start;
    LILY_UNROLL
    for (int r = 0; r < Prepare::RUNS; ++r) {
      words[i][r] = lily_load<UNIT>(source + Prepare::column(r, lane));
    }
  }
  // The rotations need no data of the heads, so they are computed while it is on its way.
  lily_rotation rotations[Prepare::PAIRS_PER_LANE];
  LILY_UNROLL
  for (int p = 0; p < Prepare::PAIRS_PER_LANE; ++p) {
    const int pair = p * 32 + int(lane);
    rotations[p] = lily_rotation_at(position[row] + t, pair < Prepare::PAIRS ? frequencies[pair] : 0.0f);
  }
  f32 x[HEADS][Prepare::COLUMNS_PER_LANE];
  LILY_UNROLL
  for (int i = 0; i < HEADS; ++i) {
    if (first + i < Hq + Hk) {
      LILY_UNROLL
      for (int r = 0; r < Prepare::RUNS; ++r) {
        lily_unpack(words[i][r], x[i] + r * UNIT);
      }
      Prepare::normalise(x[i], first + i < Hq ? q_weight : k_weight, shared + i * Prepare::ROTATED, lane);
    }
  }
  lily_simdgroup_barrier();
  LILY_UNROLL
  for (int i = 0; i < HEADS; ++i) {
    if (first + i < Hq + Hk) {
      LILY_UNROLL
      for (int p = 0; p < Prepare::PAIRS_PER_LANE; ++p) {
        const int pair = p * 32 + int(lane);
        if (pair < Prepare::PAIRS) {
          LILY_THREADGROUP f32* pairs = shared + i * Prepare::ROTATED + pair;
          const f32 one = pairs[0];
          const f32 other = pairs[Prepare::PAIRS];
          pairs[0] = rotations[p].first(one, other);
          pairs[Prepare::PAIRS] = rotations[p].second(other, one);
        }
      }
    }
  }
  lily_simdgroup_barrier();
  LILY_UNROLL
  for (int i = 0; i < HEADS; ++i) {
    const int head = first + i;
    const int kv_head = (head - Hq) % Hk;
    const i64 kv_offset = HAS_BEFORE ? (kv_head * 2 + 1) * D : ((i64(row) * Hk + kv_head) * T + t) * D;
    if constexpr (HAS_BEFORE) {
      if (head >= Hq && head < Prepare::ALL_HEADS) {
        const bool is_key = head < Hq + Hk;
        LILY_UNROLL
        for (int r = 0; r < Prepare::RUNS; ++r) {
          const int column = Prepare::column(r, lane);
          lily_store<UNIT>(
              (is_key ? k : v) + kv_head * 2 * D + column,
              lily_load<UNIT>((is_key ? k_before : v_before) + (kv_head * 2 + 1) * D + column));
        }
      }
    }
    if (head < Hq) {
      Prepare::reload(shared + i * Prepare::ROTATED, x[i], lane);
      Prepare::store(q + ((i64(row) * Hq + head) * T + t) * D, x[i], lane);
    } else if (head < Hq + Hk) {
      Prepare::reload(shared + i * Prepare::ROTATED, x[i], lane);
      Prepare::store(k + kv_offset, x[i], lane);
    } else if (head < Prepare::ALL_HEADS) {
      LILY_UNROLL
      for (int r = 0; r < Prepare::RUNS; ++r) {
        lily_store<UNIT>(v + kv_offset + Prepare::column(r, lane), words[i][r]);
      }
    }
  }
}

// ---- body ----
LILY_THREADGROUP_ARRAY(f32, shared, SIMDGROUPS * HEADS * ((ROTARY + 7) / 8 * 8));
qk_prepare<
    InT, QT, Hq, Hk, D, ROTARY, COLUMNS, Q_OFFSET, K_OFFSET, V_OFFSET, EPS_BITS, ONE_TOKEN, HAS_BEFORE, HEADS,
    SIMDGROUPS>(
    projected, q_weight, k_weight, frequencies, position, sizes, k_before, v_before, q, k, v, shared,
    threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
