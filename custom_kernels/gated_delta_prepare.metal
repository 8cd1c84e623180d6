// From the input projections of a gated DeltaNet layer to what its scan reads, for a sequence of tokens.
//
//   x    = silu(conv(window of the last 4 qkv))                   depthwise, oldest token first
//   q    = x_q / sqrt(|x_q|^2 + 1e-6) / sqrt(Dk),  k = x_k / sqrt(|x_k|^2 + 1e-6),  v = x_v
//   g    = exp(-exp(A_log) softplus(a + dt_bias)),  beta = sigmoid(b)
//
// The conv's input is the conv state followed by qkv, which counts as zero where mask[b, t] is false.
//
//   qkv          [B, T, *]       InT    C = 2 Hk Dk + Hv Dv channels from column QKV_OFFSET of QKV_COLUMNS: q, k, v
//   b, a         [B, T, *]       InT    Hv from columns B_OFFSET of B_COLUMNS, A_OFFSET of A_COLUMNS
//   conv_weight  [C, 4, 1]       InT
//   conv_state   [B, 3, C]       InT    the three tokens before the first, oldest first
//   A_log        [Hv]            ALogT
//   dt_bias      [Hv]            InT
//   mask         [B, T]          bool   read only if HAS_MASK
//   lengths      [B]             i32    read only if HAS_LENGTHS: how many of the row's tokens there are, any integer
//   sizes        [8]             i32    sizes[0] = T
//   q, k         [B, T, Hk, Dk]  InT
//   v            [B, T, Hv, Dv]  InT
//   g            [B, T, Hv]      f32
//   beta         [B, T, Hv]      InT
//   conv_out     [B, 3, C]       InT    the conv's input at the three tokens before token clamp(lengths[b], 0, T), or T
//
// The three projections may be one buffer, given three times with different offsets.
//
// Who owns what: a threadgroup owns TOKENS neighbouring tokens of SIMDGROUPS blocks of channels; a simdgroup's block is as
// many whole heads as lily_head_lanes lays on its lanes. Blocks are the heads of q and k, then those of v; the last
// threadgroup along y owns the gates of the tokens instead. Who has the last token that counts writes the conv state.
//
// Limits: Dk and Dv multiples of 32; offsets and columns of qkv multiples of BYTES; BYTES 8 or 16.
//
// Why this order: the kernel is bound by memory. Every load of a lane, TOKENS + 3 runs of BYTES, is requested before
// the first is used; the three tokens that the tokens before share with it come from cache. Everything is fp32 between the loads
// and the stores.

#include "common/gates.h"
#include "common/head_lanes.h"
#include "common/row_sum.h"

template <
    typename InT, typename ALogT, int Dk, int Dv, int Hk, int Hv, int QKV_OFFSET, int QKV_COLUMNS, int B_OFFSET,
    int B_COLUMNS, int A_OFFSET, int A_COLUMNS, int TOKENS, int BYTES, int SIMDGROUPS, bool HAS_MASK, bool HAS_LENGTHS>
struct GatedDeltaPrepare {
  static_assert(Hv % Hk == 0, "Hv is a multiple of Hk");
  using Key = lily_head_lanes<InT, Dk, BYTES>;
  using Value = lily_head_lanes<InT, Dv, BYTES>;
  static_assert(QKV_OFFSET % Key::UNIT == 0 && QKV_COLUMNS % Key::UNIT == 0, "qkv starts at whole loads");
  enum : int {
    CHANNELS = 2 * Hk * Dk + Hv * Dv,
    WEIGHTS = 16 / int(sizeof(InT)),  // in a load
    KEY_BLOCKS = (2 * Hk + Key::HEADS - 1) / Key::HEADS,
    VALUE_BLOCKS = (Hv + Value::HEADS - 1) / Value::HEADS,
    BLOCKS = KEY_BLOCKS + VALUE_BLOCKS
  };

  LILY_DEVICE const InT* qkv;
  LILY_DEVICE const InT* conv_weight;
  LILY_DEVICE const InT* conv_state;
  LILY_DEVICE const bool* mask;
  LILY_DEVICE InT* conv_out;
  i64 row;    // of the batch
  int first;  // token
  int end;    // the token whose three tokens before it are the new conv state
  int T;

  // Token t of the conv's input, from -3 on, channels channel .. channel + UNIT - 1; past the end zero.
  LILY_INLINE lily_vec<InT, Key::UNIT> token(int t, int channel) {
    if (t < 0) {
      return lily_load<Key::UNIT>(conv_state + (row * 3 + 3 + t) * CHANNELS + channel);
    }
    if (t < T && (!HAS_MASK || mask[row * T + t])) {
      return lily_load<Key::UNIT>(qkv + (row * T + t) * QKV_COLUMNS + QKV_OFFSET + channel);
    }
    f32 zeros[Key::UNIT];
    LILY_UNROLL
    for (int i = 0; i < Key::UNIT; ++i) {
      zeros[i] = 0.0f;
    }
    return lily_pack<InT, Key::UNIT>(zeros);
  }

  template <typename Lanes>
  static LILY_INLINE void unpack(LILY_THREAD const lily_vec<InT, Lanes::UNIT>* runs, LILY_THREAD f32* values) {
    LILY_UNROLL
    for (int r = 0; r < Lanes::RUNS; ++r) {
      lily_unpack(runs[r], values + r * Lanes::UNIT);
    }
  }

  // The tokens of a head that starts at a channel. target: the head at token 0 of batch row 0; target_columns: elements
  // from a token to the next. A lane that has no head (exists is false) computes some head and stores nothing.
  template <typename Lanes, bool NORMALISE>
  LILY_INLINE void run(int channel, bool exists, f32 scale, LILY_DEVICE InT* target, int target_columns, uint lane) {
    lily_vec<InT, Lanes::UNIT> window[TOKENS + 3][Lanes::RUNS];
    LILY_UNROLL
    for (int i = 0; i < TOKENS + 3; ++i) {
      LILY_UNROLL
      for (int r = 0; r < Lanes::RUNS; ++r) {
        window[i][r] = token(first + i - 3, channel + Lanes::at(r, lane));
      }
    }
    f32 weight[Lanes::ELEMENTS * 4];  // of an element its four taps
    LILY_UNROLL
    for (int r = 0; r < Lanes::RUNS; ++r) {
      LILY_UNROLL
      for (int i = 0; i < Lanes::UNIT * 4; i += WEIGHTS) {
        lily_unpack(
            lily_load<WEIGHTS>(conv_weight + (channel + Lanes::at(r, lane)) * 4 + i),
            weight + r * Lanes::UNIT * 4 + i);
      }
    }
    f32 values[4][Lanes::ELEMENTS];  // of the tokens of a window, token i in row i % 4
    LILY_UNROLL
    for (int i = 0; i < 3; ++i) {
      unpack<Lanes>(window[i], values[i]);
    }
    LILY_UNROLL
    for (int i = 0; i < TOKENS; ++i) {
      unpack<Lanes>(window[i + 3], values[(i + 3) % 4]);
      f32 x[Lanes::ELEMENTS];
      f32 squares = 0.0f;
      LILY_UNROLL
      for (int c = 0; c < Lanes::ELEMENTS; ++c) {
        x[c] = values[i % 4][c] * weight[c * 4];
        LILY_UNROLL
        for (int tap = 1; tap < 4; ++tap) {
          x[c] = lily_fma(values[(i + tap) % 4][c], weight[c * 4 + tap], x[c]);
        }
      }
      LILY_UNROLL
      for (int c = 0; c < Lanes::ELEMENTS; ++c) {
        x[c] = lily_fast_silu(x[c]);
        squares = lily_fma(x[c], x[c], squares);
      }
      if (NORMALISE) {
        const f32 norm = lily_rsqrt(lily_row_sum<Lanes::LANES>(squares) + 1e-6f) * scale;
        LILY_UNROLL
        for (int c = 0; c < Lanes::ELEMENTS; ++c) {
          x[c] *= norm;
        }
      }
      if (exists && first + i < T) {
        LILY_UNROLL
        for (int r = 0; r < Lanes::RUNS; ++r) {
          lily_store<Lanes::UNIT>(
              target + (row * T + first + i) * target_columns + Lanes::at(r, lane),
              lily_pack<InT, Lanes::UNIT>(x + r * Lanes::UNIT));
        }
      }
    }
    // Whoever has token end - 1 writes the state; without such a token, whoever has token 0. The window is loaded
    // again for it: kept, it would take the registers that keep more simdgroups in flight.
    if (exists && (end == 0 ? first == 0 : first < end && end <= first + TOKENS)) {
      LILY_UNROLL
      for (int r = 0; r < Lanes::RUNS; ++r) {
        LILY_UNROLL
        for (int i = 0; i < 3; ++i) {
          const int at = channel + Lanes::at(r, lane);
          lily_store<Lanes::UNIT>(conv_out + (row * 3 + i) * CHANNELS + at, token(end - 3 + i, at));
        }
      }
    }
  }
};

template <
    typename InT, typename ALogT, int Dk, int Dv, int Hk, int Hv, int QKV_OFFSET, int QKV_COLUMNS, int B_OFFSET,
    int B_COLUMNS, int A_OFFSET, int A_COLUMNS, int TOKENS, int BYTES, int SIMDGROUPS, bool HAS_MASK, bool HAS_LENGTHS>
LILY_INLINE void gated_delta_prepare(
    LILY_DEVICE const InT* qkv,
    LILY_DEVICE const InT* b,
    LILY_DEVICE const InT* a,
    LILY_DEVICE const InT* conv_weight,
    LILY_DEVICE const InT* conv_state,
    LILY_DEVICE const ALogT* A_log,
    LILY_DEVICE const InT* dt_bias,
    LILY_DEVICE const bool* mask,
    LILY_DEVICE const i32* lengths,
    LILY_DEVICE const i32* sizes,
    LILY_DEVICE InT* q,
    LILY_DEVICE InT* k,
    LILY_DEVICE InT* v,
    LILY_DEVICE f32* g,
    LILY_DEVICE InT* beta,
    LILY_DEVICE InT* conv_out,
    uint3 group,  // x: block of tokens, y: blocks of channels, then the gates, z: batch row
    uint thread_index,
    uint simdgroup,
    uint lane) {
  using Prepare = GatedDeltaPrepare<
      InT, ALogT, Dk, Dv, Hk, Hv, QKV_OFFSET, QKV_COLUMNS, B_OFFSET, B_COLUMNS, A_OFFSET, A_COLUMNS, TOKENS,
      BYTES, SIMDGROUPS, HAS_MASK, HAS_LENGTHS>;
  using Key = typename Prepare::Key;
  using Value = typename Prepare::Value;
  const int T = sizes[0];
  const i64 row = i64(group.z);
  const int first = int(group.x) * TOKENS;
  const int block = int(group.y) * SIMDGROUPS + int(simdgroup);

  Prepare prepare;
  prepare.qkv = qkv;
  prepare.conv_weight = conv_weight;
  prepare.conv_state = conv_state;
  prepare.mask = mask;
  prepare.conv_out = conv_out;
  prepare.row = row;
  prepare.first = first;
  prepare.end = HAS_LENGTHS ? lily_max(0, lily_min(lengths[row], T)) : T;
  prepare.T = T;

  if (int(group.y) * SIMDGROUPS >= Prepare::BLOCKS) {
    for (int i = int(thread_index); i < TOKENS * Hv; i += SIMDGROUPS * 32) {
      const int head = i % Hv;
      const int token = first + i / Hv;
      if (token < T) {
        const i64 at = row * T + token;
        const f32 rate = lily_to_f32(b[at * B_COLUMNS + B_OFFSET + head]);
        const f32 step = lily_softplus(lily_to_f32(a[at * A_COLUMNS + A_OFFSET + head]) + lily_to_f32(dt_bias[head]));
        g[at * Hv + head] = lily_exp(-lily_exp(lily_to_f32(A_log[head])) * step);
        beta[at * Hv + head] = lily_from_f32<InT>(lily_sigmoid(rate));
      }
    }
  } else if (block < Prepare::KEY_BLOCKS) {
    const int slot = block * Key::HEADS + int(lane) / Key::LANES;  // heads of q, then of k
    const bool exists = slot < 2 * Hk;
    const int head = exists ? slot : 2 * Hk - 1;
    const bool is_q = head < Hk;
    prepare.template run<Key, true>(
        head * Dk, exists, is_q ? lily_rsqrt(f32(Dk)) : 1.0f, is_q ? q + head * Dk : k + (head - Hk) * Dk, Hk * Dk,
        lane);
  } else if (block < Prepare::BLOCKS) {
    const int slot = (block - Prepare::KEY_BLOCKS) * Value::HEADS + int(lane) / Value::LANES;
    const bool exists = slot < Hv;
    const int head = exists ? slot : Hv - 1;
    prepare.template run<Value, false>(2 * Hk * Dk + head * Dv, exists, 1.0f, v + head * Dv, Hv * Dv, lane);
  }
}

// ---- body ----
gated_delta_prepare<
    InT, ALogT, Dk, Dv, Hk, Hv, QKV_OFFSET, QKV_COLUMNS, B_OFFSET, B_COLUMNS, A_OFFSET, A_COLUMNS, TOKENS, BYTES,
    SIMDGROUPS, HAS_MASK, HAS_LENGTHS>(
    qkv, b, a, conv_weight, conv_state, A_log, dt_bias, mask, lengths, sizes, q, k, v, g, beta, conv_out,
    threadgroup_position_in_grid, thread_index_in_threadgroup, simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup);
