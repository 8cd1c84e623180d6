// Gated DeltaNet scan with the state in registers.
//
//   S_t = g_t S_{t-1} + beta_t (v_t - g_t S_{t-1} k_t) k_t^T        S [Dv, Dk], one per value head
//   y_t = S_t q_t
//
// A masked token (mask[b, t] false) leaves S as it is and has y_t = 0.
//
//   q, k       [B, T, Hk, Dk]  InT     normalised; the readout scale is folded into q
//   v          [B, T, Hv, Dv]  InT
//   g          [B, T, Hv]      f32     decay
//   beta       [B, T, Hv]      BetaT
//   state_in   [B, Hv, Dv, Dk] f32
//   mask       [B, T]          bool    read only if HAS_MASK
//   sizes      [8]             i32     sizes[0] = T
//   y          [B, T, Hv, Dv]  InT
//   state_out  [B, Hv, Dv, Dk] f32
//
// Value head h reads key head h / (Hv / Hk).
//
// Who owns what: LANES neighbouring lanes own ROWS rows of S (rows are value channels); a lane holds
// Dk / LANES columns of each, in runs of UNIT columns, run r of lane l at column (r * LANES + l) * UNIT. So a
// simdgroup owns 32 / LANES * ROWS rows of one value head and carries them over all tokens; nothing is shared
// between simdgroups and there is no threadgroup memory.
//
// Limits: Dk and Dv multiples of 32, Hv a multiple of Hk; LANES a power of two that divides Dk; ROWS 1, 2, 4
// or 8; Dv a multiple of the rows of a simdgroup.
//
// Why this order: the time of a token is one chain, S k -> sum over lanes -> delta -> S. The readout S_t q_t
// is not in it, so it is computed one token late, beside S_t k_{t+1}, and its sum over lanes hides in the
// other's. g_t is applied to S k after the sum, so that the decay of S itself also runs beside the sum. Inputs
// are read AHEAD tokens early, because nothing else hides the latency of memory with so few simdgroups.

#include "common/row_sum.h"

template <typename InT, typename BetaT, int Dk, int Dv, int Hk, int Hv, int LANES, int ROWS, int AHEAD, bool HAS_MASK>
struct GatedDeltaScan {
  static_assert(Dk % 32 == 0 && Dv % 32 == 0, "Dk and Dv are multiples of 32");
  static_assert(Hv % Hk == 0, "Hv is a multiple of Hk");
  static_assert(Dk % LANES == 0 && 32 % LANES == 0, "LANES divides Dk and 32");
  static_assert(Dv % (32 / LANES * ROWS) == 0, "Dv is a multiple of the rows of a simdgroup");
  enum : int {
    COLUMNS_PER_LANE = Dk / LANES,
    UNIT = COLUMNS_PER_LANE % 8 == 0 ? 8 : COLUMNS_PER_LANE % 4 == 0 ? 4 : COLUMNS_PER_LANE % 2 == 0 ? 2 : 1,
    RUNS = COLUMNS_PER_LANE / UNIT,
    ROWS_PER_SIMDGROUP = 32 / LANES * ROWS,
    // Independent partial sums of a dot product: a multiply-add takes four cycles, so four in flight.
    CHAINS = ROWS >= 4 || COLUMNS_PER_LANE < 2 ? 1 : ROWS == 2 || COLUMNS_PER_LANE < 4 ? 2 : 4
  };

  struct Token {
    lily_vec<InT, UNIT> k[RUNS];
    lily_vec<InT, UNIT> q[RUNS];
    lily_vec<InT, ROWS> v;
    f32 g;
    BetaT beta;
    bool keep;
  };

  // At the first token of the current block of AHEAD tokens.
  LILY_DEVICE const InT* q;
  LILY_DEVICE const InT* k;
  LILY_DEVICE const InT* v;
  LILY_DEVICE const f32* g;
  LILY_DEVICE const BetaT* beta;
  LILY_DEVICE const bool* mask;
  LILY_DEVICE InT* y;
  bool writes_y;

  f32 state[ROWS][COLUMNS_PER_LANE];
  f32 q_before[COLUMNS_PER_LANE];  // the token before: its readout is still to come
  bool keep_before;
  Token tokens[AHEAD];

  // The token at a distance, known to the compiler, from the start of the block.
  LILY_INLINE void load(LILY_THREAD Token& token, int distance) {
    LILY_UNROLL
    for (int r = 0; r < RUNS; ++r) {
      token.k[r] = lily_load<UNIT>(k + distance * (Hk * Dk) + r * (LANES * UNIT));
      token.q[r] = lily_load<UNIT>(q + distance * (Hk * Dk) + r * (LANES * UNIT));
    }
    token.v = lily_load<ROWS>(v + distance * (Hv * Dv));
    token.g = g[distance * Hv];
    token.beta = beta[distance * Hv];
    token.keep = HAS_MASK ? mask[distance] : true;
  }

  LILY_INLINE void next_block() {
    q += AHEAD * Hk * Dk;
    k += AHEAD * Hk * Dk;
    v += AHEAD * Hv * Dv;
    g += AHEAD * Hv;
    beta += AHEAD * Hv;
    y += AHEAD * Hv * Dv;
    if (HAS_MASK) {
      mask += AHEAD;
    }
  }

  LILY_INLINE static void unpack(LILY_THREAD const lily_vec<InT, UNIT>* runs, LILY_THREAD f32* columns) {
    LILY_UNROLL
    for (int r = 0; r < RUNS; ++r) {
      lily_unpack(runs[r], columns + r * UNIT);
    }
  }

  LILY_INLINE static f32 dot(LILY_THREAD const f32* row, LILY_THREAD const f32* columns) {
    f32 partial[CHAINS];
    LILY_UNROLL
    for (int c = 0; c < CHAINS; ++c) {
      partial[c] = row[c] * columns[c];
    }
    LILY_UNROLL
    for (int i = CHAINS; i < COLUMNS_PER_LANE; ++i) {
      partial[i % CHAINS] = lily_fma(row[i], columns[i], partial[i % CHAINS]);
    }
    LILY_UNROLL
    for (int c = CHAINS / 2; c >= 1; c /= 2) {
      LILY_UNROLL
      for (int i = 0; i < c; ++i) {
        partial[i] += partial[i + c];
      }
    }
    return partial[0];
  }

  LILY_INLINE void write_readout(LILY_THREAD const f32* readout, int distance) {
    f32 values[ROWS];
    LILY_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      values[i] = keep_before ? readout[i] : 0.0f;
    }
    if (writes_y) {
      lily_store<ROWS>(y + distance * (Hv * Dv), lily_pack<InT, ROWS>(values));
    }
  }

  // Token i of the block, and into its slot, if there is one, the token AHEAD of it.
  LILY_INLINE void step(int i, bool is_first, bool has_next) {
    LILY_THREAD Token& token = tokens[i];
    f32 k_columns[COLUMNS_PER_LANE];
    unpack(token.k, k_columns);
    f32 recalled[ROWS];
    f32 readout[ROWS];
    LILY_UNROLL
    for (int row = 0; row < ROWS; ++row) {
      recalled[row] = dot(state[row], k_columns);
      readout[row] = dot(state[row], q_before);
    }
    LILY_UNROLL
    for (int row = 0; row < ROWS; ++row) {
      recalled[row] = lily_row_sum<LANES>(recalled[row]);
      readout[row] = lily_row_sum<LANES>(readout[row]);
    }
    f32 v_rows[ROWS];
    lily_unpack(token.v, v_rows);
    const f32 decay = token.g;
    const f32 rate = lily_to_f32(token.beta);
    const bool keep = token.keep;
    unpack(token.q, q_before);
    if (has_next) {
      load(token, i + AHEAD);
    }
    if (!is_first) {
      write_readout(readout, i - 1);
    }
    keep_before = keep;
    if (keep) {
      LILY_UNROLL
      for (int row = 0; row < ROWS; ++row) {
        const f32 delta = (v_rows[row] - decay * recalled[row]) * rate;
        LILY_UNROLL
        for (int c = 0; c < COLUMNS_PER_LANE; ++c) {
          state[row][c] = lily_fma(k_columns[c], delta, state[row][c] * decay);
        }
      }
    }
  }

  LILY_INLINE void run(LILY_DEVICE const f32* state_in, LILY_DEVICE f32* state_out, int T) {
    LILY_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      LILY_UNROLL
      for (int r = 0; r < RUNS; ++r) {
        lily_unpack(lily_load<UNIT>(state_in + i * Dk + r * (LANES * UNIT)), state[i] + r * UNIT);
      }
    }
    LILY_UNROLL
    for (int c = 0; c < COLUMNS_PER_LANE; ++c) {
      q_before[c] = 0.0f;
    }
    keep_before = false;
    LILY_UNROLL
    for (int i = 0; i < AHEAD; ++i) {
      if (i < T) {
        load(tokens[i], i);
      }
    }

    // Blocks all of whose tokens have a token AHEAD of them need no conditions; then come one or two that do.
    int t = 0;
    LILY_NO_UNROLL
    for (; t + 2 * AHEAD <= T; t += AHEAD) {
      LILY_UNROLL
      for (int i = 0; i < AHEAD; ++i) {
        step(i, t + i == 0, true);
      }
      next_block();
    }
    LILY_NO_UNROLL
    for (; t < T; t += AHEAD) {
      LILY_UNROLL
      for (int i = 0; i < AHEAD; ++i) {
        if (t + i < T) {
          step(i, t + i == 0, t + i + AHEAD < T);
        }
      }
      next_block();
    }

    f32 readout[ROWS];
    LILY_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      readout[i] = lily_row_sum<LANES>(dot(state[i], q_before));
    }
    write_readout(readout, T - 1 - t);
    LILY_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      LILY_UNROLL
      for (int r = 0; r < RUNS; ++r) {
        lily_store<UNIT>(state_out + i * Dk + r * (LANES * UNIT), lily_pack<f32, UNIT>(state[i] + r * UNIT));
      }
    }
  }
};

template <typename InT, typename BetaT, int Dk, int Dv, int Hk, int Hv, int LANES, int ROWS, int AHEAD, bool HAS_MASK>
LILY_INLINE void gated_delta_scan(
    LILY_DEVICE const InT* q,
    LILY_DEVICE const InT* k,
    LILY_DEVICE const InT* v,
    LILY_DEVICE const f32* g,
    LILY_DEVICE const BetaT* beta,
    LILY_DEVICE const f32* state_in,
    LILY_DEVICE const bool* mask,
    LILY_DEVICE const i32* sizes,
    LILY_DEVICE InT* y,
    LILY_DEVICE f32* state_out,
    uint3 position,  // y: block of rows, z: batch row and value head
    uint lane) {
  using Scan = GatedDeltaScan<InT, BetaT, Dk, Dv, Hk, Hv, LANES, ROWS, AHEAD, HAS_MASK>;
  const int T = sizes[0];
  const int batch = int(position.z) / Hv;
  const int value_head = int(position.z) % Hv;
  const int key_head = value_head / (Hv / Hk);
  const int lane_in_row = int(lane) % LANES;
  const int row = int(position.y) * Scan::ROWS_PER_SIMDGROUP + int(lane) / LANES * ROWS;
  const int column = lane_in_row * Scan::UNIT;

  const i64 token = i64(batch) * T;
  const i64 key_offset = (token * Hk + key_head) * Dk + column;
  const i64 value_offset = (token * Hv + value_head) * Dv + row;
  const i64 gate_offset = token * Hv + value_head;
  const i64 state_offset = (i64(position.z) * Dv + row) * Dk + column;

  Scan scan;
  scan.q = q + key_offset;
  scan.k = k + key_offset;
  scan.v = v + value_offset;
  scan.g = g + gate_offset;
  scan.beta = beta + gate_offset;
  scan.mask = mask + (HAS_MASK ? token : 0);
  scan.y = y + value_offset;
  scan.writes_y = lane_in_row == 0;
  scan.run(state_in + state_offset, state_out + state_offset, T);
}

// ---- body ----
gated_delta_scan<InT, BetaT, Dk, Dv, Hk, Hv, LANES, ROWS, AHEAD, HAS_MASK>(
    q, k, v, g, beta, state_in, mask, sizes, y, state_out, thread_position_in_grid, thread_index_in_simdgroup);
