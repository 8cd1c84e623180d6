// The gated RMSNorm after a gated DeltaNet scan.
//
//   out = silu(z) * weight * rmsnorm(y)                           rmsnorm over the Dv values of a head
//
//   y       [B, T, Hv, Dv]  InT
//   z       [B, T, *]       InT   Hv Dv from column Z_OFFSET of Z_COLUMNS
//   weight  [Dv]            InT
//   sizes   [8]             i32   sizes[0] = B T Hv, the heads of all tokens
//   out     [B, T, N]       InT   N = Hv Dv
//
// Who owns what: a simdgroup owns ROWS lily_head_lanes::HEADS neighbouring heads, a group of LANES lanes ROWS of them, HEADS
// apart. A lane whose heads are past the last reads the last one and stores nothing.
//
// Limits: Dv a multiple of 32; offset and columns of z multiples of 16 bytes.
//
// Why ROWS: the kernel is bound by memory, and a lane requests the loads of all its heads before it uses the first.
// Everything is fp32 between the loads and the stores.

#include "common/gates.h"
#include "common/head_lanes.h"
#include "common/row_sum.h"

template <typename InT, int Dv, int Hv, int Z_OFFSET, int Z_COLUMNS, int EPS_BITS, int ROWS, int SIMDGROUPS>
LILY_INLINE void gated_rms_norm(
    LILY_DEVICE const InT* y,
    LILY_DEVICE const InT* z,
    LILY_DEVICE const InT* weight,
    LILY_DEVICE const i32* sizes,
    LILY_DEVICE InT* out,
    uint group,
    uint simdgroup,
    uint lane) {
  using Lanes = lily_head_lanes<InT, Dv>;
  static_assert(Z_OFFSET % Lanes::UNIT == 0 && Z_COLUMNS % Lanes::UNIT == 0, "z starts at whole loads");
  const int heads = sizes[0];
  const int first =
      (int(group) * SIMDGROUPS + int(simdgroup)) * (ROWS * Lanes::HEADS) + int(lane) / Lanes::LANES;

  lily_vec<InT, Lanes::UNIT> y_words[ROWS][Lanes::RUNS];
  lily_vec<InT, Lanes::UNIT> z_words[ROWS][Lanes::RUNS];
  LILY_UNROLL
  for (int i = 0; i < ROWS; ++i) {
    const int head = lily_min(first + i * Lanes::HEADS, heads - 1);  // of all tokens
    const i64 y_offset = i64(head) * Dv;
    const i64 z_offset = i64(head / Hv) * Z_COLUMNS + Z_OFFSET + head % Hv * Dv;
    LILY_UNROLL
    for (int r = 0; r < Lanes::RUNS; ++r) {
      y_words[i][r] = lily_load<Lanes::UNIT>(y + y_offset + Lanes::at(r, lane));
      z_words[i][r] = lily_load<Lanes::UNIT>(z + z_offset + Lanes::at(r, lane));
    }
  }
  f32 scale[Lanes::ELEMENTS];
  LILY_UNROLL
  for (int r = 0; r < Lanes::RUNS; ++r) {
    lily_unpack(lily_load<Lanes::UNIT>(weight + Lanes::at(r, lane)), scale + r * Lanes::UNIT);
  }
  LILY_UNROLL
  for (int i = 0; i < ROWS; ++i) {
    f32 x[Lanes::ELEMENTS];
    f32 squares = 0.0f;
    LILY_UNROLL
    for (int r = 0; r < Lanes::RUNS; ++r) {
      lily_unpack(y_words[i][r], x + r * Lanes::UNIT);
    }
    LILY_UNROLL
    for (int c = 0; c < Lanes::ELEMENTS; ++c) {
      squares = lily_fma(x[c], x[c], squares);
    }
    const f32 norm =
        lily_rsqrt(lily_row_sum<Lanes::LANES>(squares) / f32(Dv) + lily_f32_from_bits(u32(EPS_BITS)));
    const int head = first + i * Lanes::HEADS;
    LILY_UNROLL
    for (int r = 0; r < Lanes::RUNS; ++r) {
      f32 gate[Lanes::UNIT];
      lily_unpack(z_words[i][r], gate);
      LILY_UNROLL
      for (int c = 0; c < Lanes::UNIT; ++c) {
        gate[c] = lily_fast_silu(gate[c]) * (x[r * Lanes::UNIT + c] * norm * scale[r * Lanes::UNIT + c]);
      }
      if (head < heads) {
        lily_store<Lanes::UNIT>(out + i64(head) * Dv + Lanes::at(r, lane), lily_pack<InT, Lanes::UNIT>(gate));
      }
    }
  }
}

// ---- body ----
gated_rms_norm<InT, Dv, Hv, Z_OFFSET, Z_COLUMNS, EPS_BITS, ROWS, SIMDGROUPS>(
    y, z, weight, sizes, out, threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup);
