// The output gate of full attention, with the heads of a token put side by side for the output projection.
//
//   out[b, t, h, :] = x[b, h, t, :] * sigmoid(gate[b, t, h, :])
//
//   x          [B, Hq, T, D]  InT   what attention gave
//   projected  [B, T, *]      InT   from column OFFSET of COLUMNS, for each head: D of the query, then D of the gate
//   sizes      [8]            i32   sizes[0] = T
//   out        [B, T, N]      InT   N = Hq D
//
// Who owns what: a simdgroup owns 32 UNITS neighbouring loads of 16 bytes of one batch row's result, a lane every 32nd of
// them. What is past the end of the row is not touched.
//
// Limits: D a multiple of 32; OFFSET and COLUMNS multiples of 16 bytes.
//
// Why UNITS: the kernel is bound by memory, and a lane requests all its loads before it uses the first.

#include "common/gates.h"

template <typename InT, int Hq, int D, int OFFSET, int COLUMNS, int UNITS, int SIMDGROUPS>
LILY_INLINE void attention_gate(
    LILY_DEVICE const InT* x,
    LILY_DEVICE const InT* projected,
    LILY_DEVICE const i32* sizes,
    LILY_DEVICE InT* out,
    uint3 group,  // x: along a batch row's result, z: batch row
    uint simdgroup,
    uint lane) {
  constexpr int UNIT = 16 / int(sizeof(InT));
  constexpr int UNITS_PER_HEAD = D / UNIT;
  constexpr int UNITS_PER_TOKEN = Hq * UNITS_PER_HEAD;
  static_assert(D % UNIT == 0, "a head is whole loads");
  static_assert(OFFSET % UNIT == 0 && COLUMNS % UNIT == 0, "gates start at whole loads");
  const int T = sizes[0];
  const i64 row = i64(group.z);
  const int first = (int(group.x) * SIMDGROUPS + int(simdgroup)) * (32 * UNITS) + int(lane);

  lily_vec<InT, UNIT> x_words[UNITS];
  lily_vec<InT, UNIT> gate_words[UNITS];
  LILY_UNROLL
  for (int i = 0; i < UNITS; ++i) {
    const int unit = first + i * 32;  // of the row's result
    const int t = unit / UNITS_PER_TOKEN;
    if (t < T) {
      const int head = unit / UNITS_PER_HEAD % Hq;
      const int column = unit % UNITS_PER_HEAD * UNIT;
      x_words[i] = lily_load<UNIT>(x + ((row * Hq + head) * T + t) * D + column);
      gate_words[i] = lily_load<UNIT>(
          projected + (row * T + t) * COLUMNS + OFFSET + (2 * head + 1) * D + column);
    }
  }
  LILY_UNROLL
  for (int i = 0; i < UNITS; ++i) {
    const int unit = first + i * 32;
    if (unit < T * UNITS_PER_TOKEN) {
      f32 values[UNIT];
      f32 gate[UNIT];
      lily_unpack(x_words[i], values);
      lily_unpack(gate_words[i], gate);
      LILY_UNROLL
      for (int c = 0; c < UNIT; ++c) {
        values[c] *= lily_fast_sigmoid(gate[c]);
      }
      lily_store<UNIT>(out + row * T * (Hq * D) + i64(unit) * UNIT, lily_pack<InT, UNIT>(values));
    }
  }
}

// ---- body ----
attention_gate<InT, Hq, D, OFFSET, COLUMNS, UNITS, SIMDGROUPS>(
    x, projected, sizes, out, threadgroup_position_in_grid, simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup);
