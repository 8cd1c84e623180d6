// Choosing experts: the TOP_K largest of E logits, in one simdgroup.

// A logit as an integer of the same order: NaN lowest, the two zeros equal. 0 is left for what does not exist, so
// that a choice is in range whatever the logits are. No floating-point operation, because some GPUs take
// subnormal numbers for zero.
LILY_INLINE u32 lily_routing_key(f32 logit) {
  const u32 bits = lily_bits_from_f32(logit);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return 1u;
  }
  return bits > 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The COUNT largest of the keys that a simdgroup's lanes bring, COUNT a power of two.
//
// Every lane keeps a sorted list. Lists of lanes are merged pairwise, along the bits of the lane's number: of two
// descending lists a and b, max(a[i], b[COUNT - 1 - i]) are the COUNT largest, and they rise and then fall or
// fall and then rise, which log2(COUNT) steps of comparisons sort. So the whole choice is five exchanges deep,
// where one maximum after another would take five for each.
template <int COUNT>
struct lily_largest {
  static_assert((COUNT & (COUNT - 1)) == 0, "COUNT is a power of two");
  u32 keys[COUNT];  // descending

  LILY_INLINE void clear() {
    LILY_UNROLL
    for (int i = 0; i < COUNT; ++i) {
      keys[i] = 0u;
    }
  }

  LILY_INLINE void insert(u32 key) {
    LILY_UNROLL
    for (int i = 0; i < COUNT; ++i) {
      const u32 larger = lily_max(keys[i], key);
      key = lily_min(keys[i], key);
      keys[i] = larger;
    }
  }

  // Afterwards every lane has the largest keys of all lanes.
  LILY_INLINE void merge_lanes() {
    LILY_UNROLL
    for (u32 mask = 1; mask < 32; mask *= 2) {
      u32 others[COUNT];
      LILY_UNROLL
      for (int i = 0; i < COUNT; ++i) {
        others[i] = lily_shuffle_xor(keys[COUNT - 1 - i], mask);
      }
      LILY_UNROLL
      for (int i = 0; i < COUNT; ++i) {
        keys[i] = lily_max(keys[i], others[i]);
      }
      LILY_UNROLL
      for (int distance = COUNT / 2; distance >= 1; distance /= 2) {
        LILY_UNROLL
        for (int i = 0; i < COUNT; ++i) {
          if ((i & distance) == 0) {
            const u32 larger = lily_max(keys[i], keys[i + distance]);
            keys[i + distance] = lily_min(keys[i], keys[i + distance]);
            keys[i] = larger;
          }
        }
      }
    }
  }
};

template <int N>
struct lily_power_of_two {
  enum : int { ABOVE = 2 * lily_power_of_two<(N + 1) / 2>::ABOVE };  // the smallest that is not below N
};
template <>
struct lily_power_of_two<1> {
  enum : int { ABOVE = 1 };
};

// Writes the TOP_K experts with the largest logits to chosen, in the order of their indices; among equal logits
// the lower index is chosen. A simdgroup barrier must follow.
template <int E, int TOP_K, typename LogitT>
LILY_INLINE void lily_route(LILY_DEVICE const LogitT* logits, LILY_THREADGROUP i32* chosen, uint lane) {
  static_assert(TOP_K >= 1 && TOP_K <= E, "there are as many experts as are chosen");
  enum : int { PER_LANE = (E + 31) / 32 };
  u32 keys[PER_LANE];
  lily_largest<lily_power_of_two<TOP_K>::ABOVE> largest;
  LILY_UNROLL
  for (int i = 0; i < PER_LANE; ++i) {
    const int expert = i * 32 + int(lane);
    keys[i] = expert < E ? lily_routing_key(lily_to_f32(logits[expert])) : 0u;
  }
  largest.clear();
  LILY_UNROLL
  for (int i = 0; i < PER_LANE; ++i) {
    largest.insert(keys[i]);
  }
  largest.merge_lanes();
  const u32 smallest = largest.keys[TOP_K - 1];  // of those chosen

  int equal_left = TOP_K;  // experts with the smallest key still to choose
  LILY_UNROLL
  for (int i = 0; i < PER_LANE; ++i) {
    equal_left -= int(lily_popcount(lily_ballot(keys[i] > smallest)));
  }
  const u32 lanes_below = (1u << lane) - 1u;
  int place = 0;
  LILY_UNROLL
  for (int i = 0; i < PER_LANE; ++i) {
    const u32 equal = lily_ballot(keys[i] == smallest);
    const bool first_equal = keys[i] == smallest && int(lily_popcount(equal & lanes_below)) < equal_left;
    const bool is_chosen = keys[i] > smallest || first_equal;
    const u32 holders = lily_ballot(is_chosen);
    if (is_chosen) {
      chosen[place + int(lily_popcount(holders & lanes_below))] = i * 32 + int(lane);
    }
    equal_left -= int(lily_popcount(equal));
    place += int(lily_popcount(holders));
  }
}

// The softmax over the chosen logits: the renormalised routing weight in lane t < TOP_K, 0 in other lanes.
// logit is that of the lane's expert, anything in lanes from TOP_K on.
template <int TOP_K>
LILY_INLINE f32 lily_routing_weight(f32 logit, uint lane) {
  const bool is_chosen = int(lane) < TOP_K;
  const f32 largest = lily_simd_max(is_chosen ? logit : -LILY_INFINITY);
  const f32 weight = is_chosen ? lily_exp(logit - largest) : 0.0f;
  return weight / lily_simd_sum(weight);
}
