// Choosing experts in one simdgroup: the TOP_K largest of E logits, the largest first.
//
// Few logits are worth comparing. Of the largest keys of TOP_K or more groups of lanes, the smallest is a bound
// that at least TOP_K keys reach; of 256 random keys, 22 on average reach the bound for 8. Only these are
// compared with each other: a key's rank is the number of keys before it, the larger ones and of the equal ones
// those with a lower index. No comparison waits for another one.

#include "common/route.h"

template <int E, int TOP_K>
struct lily_ranking {
  static_assert(TOP_K >= 1 && TOP_K <= E && TOP_K <= 32, "there are as many experts as are chosen; at most 32");
  enum : int {
    PER_LANE = (E + 31) / 32,
    GROUP = TOP_K > 16 ? 1 : TOP_K > 8 ? 2 : TOP_K > 4 ? 4 : TOP_K > 2 ? 8 : TOP_K > 1 ? 16 : 32,
    UNIT = 8,  // keys that are read at once
    PLACES = E + UNIT,
    INDICES_AT = PLACES,
    CHOSEN_AT = INDICES_AT + PLACES,
    WORDS = CHOSEN_AT + TOP_K
  };
  LILY_THREADGROUP u32* memory;  // [WORDS]

  // Called by one simdgroup; a barrier must follow.
  template <typename LogitT>
  LILY_INLINE void choose(LILY_DEVICE const LogitT* logits, uint lane) {
    u32 keys[PER_LANE];
    LILY_UNROLL
    for (int i = 0; i < PER_LANE; ++i) {
      const int expert = i * 32 + int(lane);
      keys[i] = expert < E ? lily_routing_key(lily_to_f32(logits[expert])) : 0u;
    }
    u32 bound = keys[0];
    LILY_UNROLL
    for (int i = 1; i < PER_LANE; ++i) {
      bound = lily_max(bound, keys[i]);
    }
    LILY_UNROLL
    for (u32 mask = 1; mask < 32; mask *= 2) {
      const u32 other = lily_shuffle_xor(bound, mask);
      bound = mask < u32(GROUP) ? lily_max(bound, other) : lily_min(bound, other);
    }
    bound = lily_max(bound, 1u);  // 0 is no key

    // In the order of their indices; the others go to the last place, which is no list's. Without branches, for
    // which compilers would put every ballot between two tests of who takes part.
    const u32 lanes_below = (1u << lane) - 1u;
    u32 holders[PER_LANE];
    LILY_UNROLL
    for (int i = 0; i < PER_LANE; ++i) {
      holders[i] = lily_ballot(keys[i] >= bound);
    }
    int count = 0;
    LILY_UNROLL
    for (int i = 0; i < PER_LANE; ++i) {
      const int place = keys[i] >= bound ? count + int(lily_popcount(holders[i] & lanes_below)) : PLACES - 1;
      memory[place] = keys[i];
      memory[INDICES_AT + place] = u32(i * 32) + lane;
      count += int(lily_popcount(holders[i]));
    }
    // The last unit is filled up with what is before no key.
    if (lane < u32(UNIT)) {
      memory[count + int(lane)] = 0u;
    }
    lily_simdgroup_barrier();

    LILY_NO_UNROLL
    for (int first = 0; first < count; first += 32) {
      const int place = lily_min(first + int(lane), count - 1);
      const u32 key = memory[place];
      int rank = 0;
      LILY_NO_UNROLL
      for (int start = 0; start < count; start += UNIT) {
        const lily_vec<u32, UNIT> others = lily_load<UNIT>(memory + start);
        LILY_UNROLL
        for (int i = 0; i < UNIT; ++i) {
          const u32 larger_than = start + i < place ? key - 1u : key;
          rank += lily_word(others, i) > larger_than ? 1 : 0;
        }
      }
      if (rank < TOP_K) {
        memory[CHOSEN_AT + rank] = memory[INDICES_AT + place];
      }
    }
  }

  LILY_INLINE int chosen(int rank) const {
    return int(memory[CHOSEN_AT + rank]);
  }
};
