// Sums within groups of neighbouring lanes.

// The sum over each aligned group of LANES lanes, in every lane of the group: the ascending xor butterfly,
// so that the order of additions, which is part of the result, is the same on every back-end.
template <int LANES>
LILY_INLINE f32 lily_row_sum(f32 x) {
  static_assert(LANES >= 1 && LANES <= 32 && (LANES & (LANES - 1)) == 0, "LANES is a power of two up to 32");
  LILY_UNROLL
  for (u32 mask = 1; mask < u32(LANES); mask *= 2) {
    x += lily_shuffle_xor(x, mask);
  }
  return x;
}
