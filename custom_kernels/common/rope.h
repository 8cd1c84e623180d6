// Rotary position embedding, split halves: element i of the first half is paired with element i of the second.

struct lily_rotation {
  f32 cosine;
  f32 sine;

  LILY_INLINE f32 first(f32 x, f32 partner) {
    return x * cosine - partner * sine;
  }
  LILY_INLINE f32 second(f32 x, f32 partner) {
    return x * cosine + partner * sine;
  }
};

// The rotation of a pair at a position. frequency: radians a position.
LILY_INLINE lily_rotation lily_rotation_at(i32 position, f32 frequency) {
  const f32 angle = f32(position) * frequency;
  lily_rotation rotation;
  rotation.cosine = lily_cos(angle);
  rotation.sine = lily_sin(angle);
  return rotation;
}
