// Gate functions of fp32 values.

LILY_INLINE f32 lily_sigmoid(f32 x) {
  return 1.0f / (1.0f + lily_exp(-x));
}

// log(1 + exp(x)). Where 1 + exp(x) drops digits of exp(x), the quotient brings them back.
LILY_INLINE f32 lily_softplus(f32 x) {
  const f32 small = lily_exp(x > 0.0f ? -x : x);
  const f32 above_one = 1.0f + small;
  const f32 tail = above_one == 1.0f ? small : lily_log(above_one) * (small / (above_one - 1.0f));
  return lily_max(x, 0.0f) + tail;
}
