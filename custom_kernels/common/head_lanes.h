// How the lanes of a simdgroup hold heads of D elements: BYTES a load, so a head may need fewer than 32 lanes.
//
// LANES neighbouring lanes hold a head; lane l of them has run r of UNIT elements at element (r LANES + l) UNIT. A
// simdgroup holds HEADS heads at a time.

template <typename T, int D, int BYTES = 16>
struct lily_head_lanes {
  static_assert(D % 32 == 0, "D is a multiple of 32");
  enum : int {
    UNIT = BYTES / int(sizeof(T)),
    UNITS = D / UNIT,
    LARGEST_POWER_OF_TWO = UNITS & -UNITS,
    LANES = LARGEST_POWER_OF_TWO < 32 ? LARGEST_POWER_OF_TWO : 32,
    RUNS = UNITS / LANES,
    ELEMENTS = RUNS * UNIT,  // of a head in a lane
    HEADS = 32 / LANES
  };

  // The first element of a run of this lane.
  static LILY_INLINE int at(int run, uint lane) {
    return (run * LANES + int(lane) % LANES) * UNIT;
  }
};
