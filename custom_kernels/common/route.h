// Choosing experts: the TOP_K largest of E logits, in one simdgroup.

// A logit as an integer of the same order: NaN lowest, the two zeros equal. 0 is left for experts that are taken
// or do not exist, so that a choice is in range whatever the logits are. No floating-point operation, because
// some GPUs take subnormal numbers for zero.
LILY_INLINE u32 lily_routing_key(f32 logit) {
  const u32 bits = lily_bits_from_f32(logit);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return 1u;
  }
  return bits > 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The expert with the t-th largest logit in lane t, for t < TOP_K; among equal logits the lower index comes
// first. Lane l looks after the experts from l * PER_LANE on, so the lowest of them is in the lowest lane.
template <int E, int TOP_K, typename LogitT>
LILY_INLINE int lily_route(LILY_DEVICE const LogitT* logits, uint lane) {
  static_assert(TOP_K <= E && TOP_K <= 32, "a lane for each chosen expert");
  enum : int { PER_LANE = (E + 31) / 32 };
  u32 keys[PER_LANE];
  LILY_UNROLL
  for (int i = 0; i < PER_LANE; ++i) {
    const int expert = int(lane) * PER_LANE + i;
    keys[i] = expert < E ? lily_routing_key(lily_to_f32(logits[expert])) : 0u;
  }
  int mine = 0;
  LILY_UNROLL
  for (int t = 0; t < TOP_K; ++t) {
    u32 best = keys[0];
    LILY_UNROLL
    for (int i = 1; i < PER_LANE; ++i) {
      best = lily_max(best, keys[i]);
    }
    const u32 largest = lily_simd_max(best);
    const u32 holders = lily_ballot(best == largest);
    const u32 holder = lily_popcount((holders & (0u - holders)) - 1u);  // the lowest lane
    int place = PER_LANE - 1;
    LILY_UNROLL
    for (int i = PER_LANE - 2; i >= 0; --i) {
      place = keys[i] == largest ? i : place;
    }
    LILY_UNROLL
    for (int i = 0; i < PER_LANE; ++i) {
      keys[i] = lane == holder && i == place ? 0u : keys[i];
    }
    const int expert = lily_shuffle(int(lane) * PER_LANE + place, holder);
    mine = int(lane) == t ? expert : mine;
  }
  return mine;
}

// The softmax over the chosen logits: the renormalised routing weight in lane t < TOP_K, 0 in other lanes.
// logit is that of the lane's expert; lane 0 has the largest.
template <int TOP_K>
LILY_INLINE f32 lily_routing_weight(f32 logit, uint lane) {
  const f32 largest = lily_broadcast_first(logit);
  const f32 weight = int(lane) < TOP_K ? lily_exp(logit - largest) : 0.0f;
  return weight / lily_simd_sum(weight);
}
