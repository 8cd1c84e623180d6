// The experts' results of each token, weighted and summed, with the residual.
//
//   out[t] = residual[t] + sum over s of weights[t, s] * y[t * SLOTS + s]
//
//   y         [T * SLOTS, H]  InT   the last slot is the shared expert's
//   weights   [T, SLOTS]      f32
//   residual  [T, H]          OutT  may be absent: HAS_RESIDUAL is false
//   sizes     [8]             i32   sizes[0] = T
//   out       [T, H]          OutT
//
// Who owns what: a lane owns UNIT neighbouring columns of one token, neighbouring lanes neighbouring columns.
// The sum is fp32, slot after slot in ascending order, the residual last, and rounded once.
//
// Limits: H a multiple of UNIT.

template <typename InT, typename OutT, int H, int SLOTS, bool HAS_RESIDUAL, int UNIT, typename ResidualT>
LILY_INLINE void expert_combine(
    LILY_DEVICE const InT* y,
    LILY_DEVICE const f32* weights,
    LILY_DEVICE const ResidualT* residual,
    LILY_DEVICE const i32* sizes,
    LILY_DEVICE OutT* out,
    uint thread_position) {
  static_assert(H % UNIT == 0, "a lane's columns are of one token");
  constexpr int UNITS = H / UNIT;
  constexpr int BATCH = SLOTS <= 12 ? SLOTS : 8;  // loads in flight
  const int token = int(thread_position / UNITS);
  if (token >= sizes[0]) {
    return;
  }
  const int column = int(thread_position % UNITS) * UNIT;
  weights += i64(token) * SLOTS;
  y += i64(token) * (i64(SLOTS) * H) + column;
  const i64 at = i64(token) * H + column;
  f32 added[UNIT];
  LILY_UNROLL
  for (int c = 0; c < UNIT; ++c) {
    added[c] = 0.0f;
  }
  if constexpr (HAS_RESIDUAL) {
    lily_unpack(lily_load<UNIT>(residual + at), added);
  }

  f32 sums[UNIT];
  LILY_UNROLL
  for (int c = 0; c < UNIT; ++c) {
    sums[c] = 0.0f;
  }
  LILY_UNROLL
  for (int first = 0; first < SLOTS; first += BATCH) {
    lily_vec<InT, UNIT> words[BATCH];
    LILY_UNROLL
    for (int i = 0; i < BATCH; ++i) {
      words[i] = lily_load<UNIT>(y + i64(lily_min(first + i, SLOTS - 1)) * H);
    }
    LILY_UNROLL
    for (int i = 0; i < BATCH; ++i) {
      if (first + i < SLOTS) {
        const f32 weight = weights[first + i];
        f32 values[UNIT];
        lily_unpack(words[i], values);
        LILY_UNROLL
        for (int c = 0; c < UNIT; ++c) {
          sums[c] = lily_fma(weight, values[c], sums[c]);
        }
      }
    }
  }
  LILY_UNROLL
  for (int c = 0; c < UNIT; ++c) {
    sums[c] += added[c];
  }
  lily_store<UNIT>(out + at, lily_pack<OutT, UNIT>(sums));
}

// ---- body ----
expert_combine<InT, OutT, H, SLOTS, HAS_RESIDUAL, UNIT>(
    y, weights, residual, sizes, out, thread_position_in_grid.x);
