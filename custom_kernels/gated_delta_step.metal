// One token of a gated DeltaNet layer between its input projections and its output projection.
//
//   x   = silu(conv(window of the last 4 qkv))                    depthwise, oldest token first
//   q   = x_q / sqrt(|x_q|^2 + 1e-6) / sqrt(Dk),  k = x_k / sqrt(|x_k|^2 + 1e-6),  v = x_v
//   g   = exp(-exp(A_log) softplus(a + dt_bias)),  beta = sigmoid(b)
//   S  <- g S + beta (v - g S k) k^T                              S [Dv, Dk], one per value head
//   y   = silu(z) * norm_weight * rmsnorm(S q)
//
//   projected    [*]            InT   qkv: 2 Hk Dk + Hv Dv channels from element QKV_OFFSET: q, k, v
//                                     z: Hv Dv elements from Z_OFFSET; b, a: Hv elements from B_OFFSET, A_OFFSET
//   constants    [*]            u32   conv_weight [C, 4, 1] InT, C = 2 Hk Dk + Hv Dv; A_log [Hv] ALogT; dt_bias [Hv] InT;
//                                     norm_weight [Dv] InT: one after another, each from a multiple of 16 bytes on
//   conv_state   [1, 3, C]      InT   the three tokens before this one, oldest first
//   state        [1, Hv, Dv, Dk] f32
//   y            [1, 1, N]      InT   N = Hv Dv
//   conv_out     [1, 3, C]      InT   conv_state moved up by this token, bit for bit
//   state_out    [1, Hv, Dv, Dk] f32
//
// Who owns what: a threadgroup owns value head h, which reads key head h / (Hv / Hk). It computes the conv and
// the norms of its key head itself; of the threadgroups that share a key head, the first alone writes the conv
// state of that head's channels. LANES neighbouring lanes own a row of S (a value channel), lane l its columns
// (r LANES + l) 4 .. + 3 for each run r; a simdgroup owns 32 / LANES rows at a time.
//
// Limits: Dk and Dv multiples of 32; Dk a multiple of 4 LANES; Dv a multiple of SIMDGROUPS 32 / LANES.
//
// Why this order: the kernel is one trip to memory, not arithmetic. Every load is requested before any result of one
// is used, so that there is one wait and not three; the state comes last, because it is the longest and the conv, the
// norms and the gates are computed while it is on its way. 8 lanes a row still read whole lines of 128 bytes and need 3
// shuffles a sum where 32 lanes need 5, for 4 times as many sums. Everything is fp32 between the loads and the stores.

#include "common/gates.h"
#include "common/row_sum.h"

template <
    typename InT, typename ALogT, int Dk, int Dv, int Hk, int Hv,
    int QKV_OFFSET, int Z_OFFSET, int B_OFFSET, int A_OFFSET, int EPS_BITS, int LANES, int SIMDGROUPS>
LILY_INLINE void gated_delta_step(
    LILY_DEVICE const InT* projected,
    LILY_DEVICE const InT* conv_weight,
    LILY_DEVICE const InT* conv_state,
    LILY_DEVICE const ALogT* A_log,
    LILY_DEVICE const InT* dt_bias,
    LILY_DEVICE const InT* norm_weight,
    LILY_DEVICE const f32* state,
    LILY_DEVICE InT* y,
    LILY_DEVICE InT* conv_out,
    LILY_DEVICE f32* state_out,
    LILY_THREADGROUP f32* mixed,    // [2 Dk + Dv]: q, k, v of this head after the conv
    LILY_THREADGROUP f32* readout,  // [Dv]
    uint value_head,
    uint thread_index,
    uint simdgroup,
    uint lane) {
  static_assert(Dk % 32 == 0 && Dv % 32 == 0, "Dk and Dv are multiples of 32");
  static_assert(Hv % Hk == 0, "Hv is a multiple of Hk");
  static_assert(32 % LANES == 0 && Dk % (4 * LANES) == 0, "LANES divides 32, and 4 LANES divides Dk");
  static_assert(Dv % (SIMDGROUPS * (32 / LANES)) == 0, "simdgroups have whole rows");
  constexpr int UNIT = 4;
  constexpr int COLUMNS_PER_LANE = Dk / LANES;
  constexpr int RUNS = COLUMNS_PER_LANE / UNIT;
  constexpr int ROWS_PER_PASS = SIMDGROUPS * (32 / LANES);
  constexpr int PASSES = Dv / ROWS_PER_PASS;
  constexpr int THREADS = SIMDGROUPS * 32;
  constexpr int OUTPUTS_PER_THREAD = (Dv + THREADS - 1) / THREADS;
  constexpr int HEAD_CHANNELS = 2 * Dk + Dv;
  constexpr int CHANNELS_PER_THREAD = (HEAD_CHANNELS + THREADS - 1) / THREADS;
  constexpr int CHANNELS = 2 * Hk * Dk + Hv * Dv;
  constexpr int HEADS_PER_KEY_HEAD = Hv / Hk;

  const int head = int(value_head);
  const int key_head = head / HEADS_PER_KEY_HEAD;
  const bool owns_key_head = head % HEADS_PER_KEY_HEAD == 0;
  const int lane_in_row = int(lane) % LANES;
  const int first_row = int(simdgroup) * (32 / LANES) + int(lane) / LANES;
  const i64 state_offset = (i64(head) * Dv + first_row) * Dk + lane_in_row * UNIT;

  int channels[CHANNELS_PER_THREAD];
  lily_vec<InT, 4> conv_words[CHANNELS_PER_THREAD];
  InT tokens[CHANNELS_PER_THREAD][4];  // oldest first
  LILY_UNROLL
  for (int i = 0; i < CHANNELS_PER_THREAD; ++i) {
    // Threads without a channel read the last one: a branch would end in a wait.
    const int c = lily_min(i * THREADS + int(thread_index), HEAD_CHANNELS - 1);
    const int channel = c < Dk ? key_head * Dk + c
        : c < 2 * Dk           ? (Hk + key_head) * Dk + c - Dk
                               : 2 * Hk * Dk + head * Dv + c - 2 * Dk;
    channels[i] = channel;
    conv_words[i] = lily_load<4>(conv_weight + channel * 4);
    LILY_UNROLL
    for (int t = 0; t < 3; ++t) {
      tokens[i][t] = conv_state[t * CHANNELS + channel];
    }
    tokens[i][3] = projected[QKV_OFFSET + channel];
  }
  const InT b = projected[B_OFFSET + head];
  const InT a = projected[A_OFFSET + head];
  const InT bias = dt_bias[head];
  const ALogT log_rate = A_log[head];
  InT z[OUTPUTS_PER_THREAD];
  InT gains[OUTPUTS_PER_THREAD];
  LILY_UNROLL
  for (int i = 0; i < OUTPUTS_PER_THREAD; ++i) {
    const int row = lily_min(i * THREADS + int(thread_index), Dv - 1);
    z[i] = projected[Z_OFFSET + head * Dv + row];
    gains[i] = norm_weight[row];
  }
  lily_vec<f32, UNIT> words[PASSES][RUNS];
  LILY_UNROLL
  for (int i = 0; i < PASSES; ++i) {
    LILY_UNROLL
    for (int r = 0; r < RUNS; ++r) {
      words[i][r] = lily_load<UNIT>(state + state_offset + i * (ROWS_PER_PASS * Dk) + r * (LANES * UNIT));
    }
  }

  LILY_UNROLL
  for (int i = 0; i < CHANNELS_PER_THREAD; ++i) {
    f32 weights[4];
    lily_unpack(conv_words[i], weights);
    f32 sum = 0.0f;
    LILY_UNROLL
    for (int t = 0; t < 4; ++t) {
      sum = lily_fma(lily_to_f32(tokens[i][t]), weights[t], sum);
    }
    const int c = i * THREADS + int(thread_index);
    if (c < HEAD_CHANNELS) {
      mixed[c] = sum * lily_sigmoid(sum);
      if (c >= 2 * Dk || owns_key_head) {
        LILY_UNROLL
        for (int t = 0; t < 3; ++t) {
          conv_out[t * CHANNELS + channels[i]] = tokens[i][t + 1];
        }
      }
    }
  }
  const f32 rate = lily_sigmoid(lily_to_f32(b));
  const f32 step = lily_softplus(lily_to_f32(a) + lily_to_f32(bias));
  const f32 decay = lily_exp(-lily_exp(lily_to_f32(log_rate)) * step);
  lily_threadgroup_barrier();

  f32 q[COLUMNS_PER_LANE];
  f32 k[COLUMNS_PER_LANE];
  f32 q_squares = 0.0f;
  f32 k_squares = 0.0f;
  LILY_UNROLL
  for (int r = 0; r < RUNS; ++r) {
    const int column = (r * LANES + lane_in_row) * UNIT;
    lily_unpack(lily_load<UNIT>(mixed + column), q + r * UNIT);
    lily_unpack(lily_load<UNIT>(mixed + Dk + column), k + r * UNIT);
  }
  LILY_UNROLL
  for (int c = 0; c < COLUMNS_PER_LANE; ++c) {
    q_squares = lily_fma(q[c], q[c], q_squares);
    k_squares = lily_fma(k[c], k[c], k_squares);
  }
  // The norms multiply sums over columns, not every column.
  const f32 q_scale = lily_rsqrt(lily_row_sum<LANES>(q_squares) + 1e-6f) * lily_rsqrt(f32(Dk));
  const f32 k_scale = lily_rsqrt(lily_row_sum<LANES>(k_squares) + 1e-6f);

  LILY_UNROLL
  for (int i = 0; i < PASSES; ++i) {
    f32 row[COLUMNS_PER_LANE];
    f32 recalled = 0.0f;
    LILY_UNROLL
    for (int r = 0; r < RUNS; ++r) {
      lily_unpack(words[i][r], row + r * UNIT);
    }
    LILY_UNROLL
    for (int c = 0; c < COLUMNS_PER_LANE; ++c) {
      recalled = lily_fma(row[c], k[c], recalled);
    }
    recalled = lily_row_sum<LANES>(recalled) * k_scale;
    const int row_index = i * ROWS_PER_PASS + first_row;
    const f32 delta = (mixed[2 * Dk + row_index] - decay * recalled) * rate * k_scale;
    f32 sum = 0.0f;
    LILY_UNROLL
    for (int c = 0; c < COLUMNS_PER_LANE; ++c) {
      row[c] = lily_fma(k[c], delta, row[c] * decay);
      sum = lily_fma(row[c], q[c], sum);
    }
    LILY_UNROLL
    for (int r = 0; r < RUNS; ++r) {
      lily_store<UNIT>(
          state_out + state_offset + i * (ROWS_PER_PASS * Dk) + r * (LANES * UNIT),
          lily_pack<f32, UNIT>(row + r * UNIT));
    }
    sum = lily_row_sum<LANES>(sum) * q_scale;
    if (lane_in_row == 0) {
      readout[row_index] = sum;
    }
  }
  lily_threadgroup_barrier();

  f32 squares = 0.0f;
  LILY_UNROLL
  for (int i = 0; i < Dv / 32; ++i) {
    const f32 value = readout[i * 32 + int(lane)];
    squares = lily_fma(value, value, squares);
  }
  const f32 scale = lily_rsqrt(lily_simd_sum(squares) / f32(Dv) + lily_f32_from_bits(u32(EPS_BITS)));
  LILY_UNROLL
  for (int i = 0; i < OUTPUTS_PER_THREAD; ++i) {
    const int row = i * THREADS + int(thread_index);
    if (row < Dv) {
      const f32 gate = lily_to_f32(z[i]);
      const f32 gain = gate * lily_sigmoid(gate) * lily_to_f32(gains[i]);
      y[head * Dv + row] = lily_from_f32<InT>(readout[row] * scale * gain);
    }
  }
}

// What does not change from token to token, in one buffer; each part from a multiple of 16 bytes on.
template <typename InT, typename ALogT, int C, int Hv>
struct GatedDeltaConstants {
  LILY_DEVICE const InT* conv_weight;
  LILY_DEVICE const ALogT* A_log;
  LILY_DEVICE const InT* dt_bias;
  LILY_DEVICE const InT* norm_weight;

  enum : int {  // first words of the parts
    A_LOG_AT = (C * 4 * int(sizeof(InT)) + 15) / 16 * 4,
    DT_BIAS_AT = A_LOG_AT + (Hv * int(sizeof(ALogT)) + 15) / 16 * 4,
    NORM_WEIGHT_AT = DT_BIAS_AT + (Hv * int(sizeof(InT)) + 15) / 16 * 4
  };

  static LILY_INLINE GatedDeltaConstants at(LILY_DEVICE const u32* constants) {
    return {
        reinterpret_cast<LILY_DEVICE const InT*>(constants),
        reinterpret_cast<LILY_DEVICE const ALogT*>(constants + A_LOG_AT),
        reinterpret_cast<LILY_DEVICE const InT*>(constants + DT_BIAS_AT),
        reinterpret_cast<LILY_DEVICE const InT*>(constants + NORM_WEIGHT_AT)};
  }
};

// ---- body ----
const auto parts = GatedDeltaConstants<InT, ALogT, 2 * Hk * Dk + Hv * Dv, Hv>::at(constants);
LILY_THREADGROUP_ARRAY(f32, mixed, 2 * Dk + Dv);
LILY_THREADGROUP_ARRAY(f32, readout, Dv);
gated_delta_step<
    InT, ALogT, Dk, Dv, Hk, Hv, QKV_OFFSET, Z_OFFSET, B_OFFSET, A_OFFSET, EPS_BITS, LANES, SIMDGROUPS>(
    projected, parts.conv_weight, conv_state, parts.A_log, parts.dt_bias, parts.norm_weight, state, y, conv_out, state_out,
    mixed, readout, threadgroup_position_in_grid.x, thread_index_in_threadgroup, simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup);
