// Unusual and right: what the strict pass must accept. One kernel a case; they compute nothing.
#include <metal_stdlib>
using namespace metal;

#define BUFFERS \
  device float *y, device half *h, device int *n, device uint *u, device bfloat *b, device float4 *v, \
      device half4 *w, uint i [[thread_position_in_grid]]

constant int base [[function_constant(3)]];
constant int twice_base = base * 2 + 1;
constant bool is_based = is_function_constant_defined(base);
struct Row {
  float4 c;
  float r[3];
};
struct Pair {
  float a, b;
};
struct Pairs {
  Pair both[2];
  Row row;
  int count;
};
inline void advance(thread float& a) {
  a += 1;
}
template <int N, typename T = float>
struct Tile {
  T v[N];
  thread T& at(int k) { return v[k]; }
  static constant constexpr int size = N;
};
template <typename T>
using Small = Tile<2, T>;
float later(float a);
inline void nothing(int) {}
inline float forward(float a) {
  return later(a);
}
float later(float a) {
  return a * 2;
}
namespace util {
constant constexpr float K = 2.0f;
template <typename T>
inline T scale(T a) {
  return a * T(K);
}
}
enum Mode : uint { A = 1, B = 2 };
union Bits { float f; uint u; };
struct Fields { uint a : 4; uint b : 28; };
inline auto both(float a, float c) {
  struct Result { float s, d; };
  return Result{a + c, a - c};
}

kernel void inputs(
    device float* q [[buffer(0)]],
    constant uint& n [[buffer(30)]],
    uint2 g [[thread_position_in_grid]],
    uint l [[thread_index_in_threadgroup]],
    ushort w [[simdgroup_index_in_threadgroup]],
    ushort2 s [[threads_per_grid]]) {
  q[g.x] = n + l + w + s.x;
}

kernel void no_indices(
    device float* q,
    constant uint& n,
    const device half* z,
    unsigned int g [[thread_position_in_grid]],
    threadgroup float* t [[threadgroup(0)]],
    uint32_t k [[threads_per_simdgroup]]) {
  q[g] = n + z[0] + t[0] + k;
}

kernel void alternatives(
    device float* q [[buffer(0), function_constant(is_based)]],
    device half* r [[buffer(0), function_constant(is_based)]]) {
  if (is_based) {
    q[0] = 1;
  } else {
    r[0] = 1;
  }
}

kernel void k1(BUFFERS) {
  float4 a = v[i];
  thread float4& r = a;
  r.x += 1;
  r.zyx = r.xyz;
  r.wzyx = r;
  v[i] = r;
}

kernel void k2(BUFFERS) {
  float a[4] = {1, 2, 3, 4};
  thread float* p = &a[2];
  thread float& q = a[1];
  q = *p;
  y[i] = q;
}

kernel void k3(BUFFERS) {
  device float4* p = &v[i];
  device float* q = (device float*)&v[i];
  q[2] = p->x;
  p->y = q[1];
}

kernel void k4(BUFFERS) {
  device float4& r = v[i];
  r[2] = 1.0f;
  r.w *= 2;
  y[i] = r.x;
}

kernel void k5(BUFFERS) {
  Row s;
  thread float4& c = s.c;
  thread float& r = s.r[1];
  r = 1;
  c.x = r;
  y[i] = s.c.x;
}

kernel void k6(BUFFERS) {
  Pair s{1, 2};
  thread float* p = &s.a;
  *p = 2;
  y[i] = s.b + Pair{3, 4}.a;
}

kernel void k7(BUFFERS) {
  float a[2] = {0, 1};
  advance(a[1]);
  float c = v[i].x;
  advance(c);
  y[i] = a[1] + c;
}

kernel void k8(BUFFERS) {
  float3x3 m = float3x3(1.0f);
  float3 c = m * v[i].xyz;
  m[0] = c;
  v[i].xyz = m[0];
  y[i] = m[1][2];
}

kernel void k9(BUFFERS) {
  if (is_based) n[i] = twice_base;
}

kernel void k10(BUFFERS) {
  b[i] = bfloat(y[i]);
  b[i] = static_cast<bfloat>(h[i]);
  b[i] = (bfloat)y[i];
  b[i] = b[i] * b[i];
  b[i] = 0;
  y[i] = b[i];
}

kernel void k11(BUFFERS) {
  y[i] = max(b[i], y[i]) + exp(b[i]) + abs(b[i]) + pow(b[i], b[i]);
  bool nan = isnan(b[i]);
}

kernel void k12(BUFFERS) {
  h[i] = y[i];
  h[i] += y[i];
  half q = 0.1;
  float r = q;
  h[i] = q * r;
}

kernel void k13(BUFFERS) {
  uint lo = extract_bits(u[i], 3u, 4u);
  u[i] = insert_bits(lo, u[i], 0, 8) + reverse_bits(lo) + rotate(lo, 5u);
}

kernel void k14(BUFFERS) {
  n[i] = max(n[i], int(u[i])) + min(3, n[i]) + clamp(n[i], -1, 1) + abs(n[i]);
  u[i] = max(u[i], 1u) + absdiff(u[i], 2u);
}

kernel void k15(BUFFERS) {
  v[i] = fma(v[i], 2.0f, v[i]);
  v[i] = mix(v[i], v[i], 0.5f);
  v[i] = clamp(v[i], 0, 1);
  v[i] = pow(min(v[i], y[i]), 2);
}

kernel void k16(BUFFERS) {
  w[i] = max(w[i], 0.0h);
  w[i] = w[i] * 2.0f + half4(v[i]);
  w[i] = exp(w[i]);
  w[i] *= 0.5;
}

kernel void k17(BUFFERS) {
  int4 a = int4(v[i]);
  a = a * 2 + 1;
  a <<= 2;
  a = max(a & 7, 0);
  bool4 m = a > 2 && a < 7;
  a = select(a, int4(0), m);
  n[i] = a.x;
}

kernel void k18(BUFFERS) {
  simdgroup_float8x8 a, c(0.0f);
  simdgroup_load(a, y, 8, ulong2(0, 8), true);
  simdgroup_multiply(c, a, a);
  simdgroup_store(c, y + 64);
}

kernel void k19(BUFFERS) {
  threadgroup float t[64];
  simdgroup_half8x8 a;
  simdgroup_load(a, (const device half*)h);
  simdgroup_float8x8 c;
  simdgroup_store(c, t, 8);
}

kernel void k20(BUFFERS) {
  y[i] = simd_sum(h[i]) + simd_max(n[i]) + simd_prefix_exclusive_sum(u[i]) + simd_shuffle_xor(v[i], 1).x +
      simd_sum(uchar(i));
}

kernel void k21(BUFFERS) {
  if (simd_any(i > 2) && simd_is_first()) n[i] = simd_and(n[i]);
  y[i] = simd_broadcast_first(simd_shuffle_and_fill_up(y[i], 0.0f, 3));
}

kernel void k22(BUFFERS) {
  device atomic_uint* a = (device atomic_uint*)u;
  atomic_fetch_max_explicit(a + i, 3u, memory_order_relaxed);
}

kernel void k23(BUFFERS) {
  threadgroup atomic_int c;
  atomic_store_explicit(&c, 0, memory_order_relaxed);
  n[i] = atomic_load_explicit(&c, memory_order_relaxed);
}

kernel void k24(BUFFERS) {
  device atomic_float* a = (device atomic_float*)y;
  atomic_fetch_add_explicit(&a[i], atomic_exchange_explicit(a, 2.0f, memory_order_relaxed),
      memory_order_relaxed);
}

kernel void k25(BUFFERS) {
  y[i] = fast::exp(y[i]) + precise::sqrt(y[i]) + fast::max(y[i], 2) + precise::log(n[i]) + pow(y[i], 2) +
      pow(n[i], 2.0f);
}

kernel void k26(BUFFERS) {
  ulong big = 0xFFFFFFFFFFul;
  long s = -5l;
  n[i] = int(big >> 3) + s + 0b101 + 1'000 + 0x1Fu + 0xFFu;
}

kernel void k27(BUFFERS) {
  y[i] = 1e-5f + 0x1p-3f + .5f + 1.h + 2.F + 1.0H + 3.0bf + 1.;
}

kernel void k28(BUFFERS) {
  Tile<2, half> t;
  t.at(1) = 2;
  y[i] = t.v[1] + Small<float>::size;
}

kernel void k29(BUFFERS) {
  nothing(n[i]);
  y[i] = forward(y[i]) + util::scale(y[i]) + util::K;
  h[i] = util::scale(h[i]);
}

kernel void k30(BUFFERS) {
  Mode m = A;
  switch (m) { case A: u[i] = B; break; default: break; } u[i] |= A | B;
}

kernel void k31(BUFFERS) {
  Bits z;
  z.f = y[i];
  Fields f;
  f.a = 3;
  u[i] = z.u + f.a;
}

kernel void k32(BUFFERS) {
  threadgroup float t[32];
  threadgroup float* p = &t[i & 31];
  threadgroup float& q = t[0];
  *p = 1;
  q += *p;
  y[i] = q;
}

kernel void k33(BUFFERS) {
  auto r = both(y[i], 2);
  y[i] = r.s * r.d;
  auto [s, d] = both(1, 2);
  y[i] += s + d;
}

kernel void k34(BUFFERS) {
  float2 a(1, 2);
  float4 c(a, a);
  float4 d = {1, 2, 3, 4};
  float3 e(1.0f);
  v[i] = c + d + float4(e, 1);
  v[i].rgb = e;
  v[i].a = 1;
  a.yx = a;
}

kernel void k35(BUFFERS) {
  packed_float3 p = packed_float3(1, 2, 3);
  float3 q = p;
  p.x = q.y;
  p = q * 2;
  y[i] = p[1] + length(q) + dot(p, q);
}

kernel void k36(BUFFERS) {
  y[i] = select(0.0f, y[i], n[i] != 0);
  v[i] = select(v[i], float4(0), isnan(v[i]));
  n[i] = select(1, 2, n[i] > 0);
}

kernel void k37(BUFFERS) {
  ushort s = ushort(i), t = min(s, ushort(4));
  s += t;
  s = max(s, t);
  n[i] = s + min(uchar(3), uchar(i)) + max(true, false);
}

kernel void k38(BUFFERS) {
  size_t k = min(size_t(i) * 4, size_t(100));
  long o = max(long(k), 3l);
  y[o] = sign(y[k]) + trunc(y[k]) + smoothstep(0, 1, y[k]);
}

kernel void k39(BUFFERS) {
  float a;
  float c = modf(y[i], a);
  int e;
  float m = frexp(c, e);
  float cs;
  float sn = sincos(m, cs);
  y[i] = ldexp(sn, e) + cs + a;
}

kernel void k40(BUFFERS) {
  y[i] = as_type<float>(u[i]) + as_type<half2>(u[i]).x;
  uchar4 q = as_type<uchar4>(u[i]);
  u[i] = as_type<uint>(q);
  const auto z = v[i].w;
}

kernel void k41(BUFFERS) {
  constexpr int N = max(3, 4);
  threadgroup float t[N * abs(-2)];
  y[i] = t[0] + step(0.5f, y[i]) + cross(v[i].xyz, v[i].xyz).x;
}

kernel void matrices(device float4x4* m [[buffer(0)]], device float3* x [[buffer(1)]]) {
  threadgroup float3x3 t;
  t = float3x3(2.0f);
  t *= t;
  x[0] = t * x[1];
  m[0] *= m[1];
  m[0] += float4x4(1);
  m[0] *= 2;
  m[0][2].xy = m[1][0].zw;
  const device float* none = NULL;
  float2x2 r = {{1, 2}, {3, 4}};
  r *= transpose(r);
  threadgroup int4 steps[2];
  steps[0] = 0;
  steps[0]++;
  --steps[1];
  x[1]--;
  x[0].x = none == NULL ? float(M_PI_BF) : r[1][0];
}

kernel void nested_braces(BUFFERS) {
  Pairs pairs = {{{1, 2}, {3, 4}}, {v[i], {1, 2, 3}}, 2};
  Row row{v[i], {1, 2, 3}};
  row = pairs.row;
  y[i] = pairs.both[1].a + row.r[1];
}

// Enumerations with a scope.
enum class Order : ushort { up, down, };
enum class Side { left, right };
struct Choice {
  enum class Kind { none, some = 5 };
  Kind kind;
  Side side;
};
template <Side side>
inline float signed_by(float x) {
  return side == Side::left ? -x : x;
}
kernel void enumerations(BUFFERS) {
  enum class Inner { first = 1 };
  Choice choice = {Choice::Kind::some, Side::right};
  Order order = Order::down;
  n[i] = int(choice.kind) + static_cast<int>(order) + int(Inner::first) + int(sizeof(Order));
  y[i] = signed_by<Side::left>(y[i]);
}

// Aggregates stay aggregates, in every address space.
struct Entry {
  int a;
  float b;
};
struct Entries {
  Entry entries[2];
  float rest;
};
struct Target {
  thread float& to;
};
constant Entry entry_table[2] = {{1, 2}, {3, 4}};
constant Entry entry_table_flat[] = {1, 2, 3, 4};
constant constexpr Entry one_entry = {1, 2};
inline Entry entry(int a) {
  return {a, 1};
}
inline int first(Entry e) {
  return e.a;
}
inline Entry loaded(const device Entry* from) {
  return *from;
}
template <typename T>
inline T loaded_from(const device T* from) {
  return from[0];
}
kernel void aggregates(device Entry* e [[buffer(0)]], constant Entry& c [[buffer(1)]],
                       uint i [[thread_position_in_grid]]) {
  threadgroup Entry t[4];
  Entry a = {.a = 1, .b = 2}, b{.a = 2}, f[2] = {1, 2, 3, 4};
  Entry d0 = e[i], d1(e[i]), d2{e[i]}, d3 = c, d4 = static_cast<Entry>(c);
  auto d5 = e[i];
  Entries g = {e[i], e[i + 1], 2}, h = {{e[0], t[1]}, float(i)};
  Entry both[2] = {e[0], c};
  float x = 1;
  Target target = {x}, other{x};
  target.to = entry(2).b;
  t[0] = e[i];
  t[1] = a;
  e[i] = e[i + 1];
  e[i] = {1, 2};
  e[i] = i > 4 ? e[0] : a;
  a = t[1];
  static_assert(one_entry.a == 1, "a constant");
  e[i].a += first(e[1]) + first(c) + first(t[0]) + loaded(e).a + loaded_from(e).a + entry_table[1].a;
  e[i].a += d0.a + d1.a + d2.a + d3.a + d4.a + d5.a + f[1].a + both[1].a + g.entries[1].a + h.entries[0].a + b.a;
  e[i].b = x + other.to + entry_table_flat[1].b + Entry(e[i]).b;
}

// Calls that look like recursion and are none.
namespace own {
inline float exp(float x) {
  return metal::exp(x);
}
}  // namespace own
template <int N>
inline float sum_of(thread const float* x) {
  if constexpr (N == 0) {
    return 0;
  } else {
    return x[N - 1] + sum_of<N - 1>(x);
  }
}
struct Inner {
  float scaled(float x) const thread {
    return x * 2;
  }
};
struct Outer {
  Inner inner;
  float scaled(float x) const thread {
    return inner.scaled(x);
  }
  float operator()(float x) const thread {
    return scaled(x);
  }
};
kernel void no_recursion(BUFFERS) {
  float two[2] = {1, 2};
  Outer outer;
  y[i] = own::exp(y[i]) + sum_of<2>(two) + outer(y[i]);
}

#ifdef __HAVE_BFLOAT__
typedef bfloat brain;
#endif
kernel void bfloats(device brain* b [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  b[i] = brain(1.5f);
}

// Elements of what has no name.
inline float4 four() {
  return float4(1);
}
kernel void elements_of_values(BUFFERS) {
  float3x3 m(1);
  y[i] = (v[i] + v[i])[2] + float4(1)[1] + v[i].xyz[1] + four()[1] + transpose(m)[0][1] + (m * m)[1].x;
  y[i] += half4(2)[0];
}

// Stages of a render pipeline beside kernels, and what is called almost like them.
struct Corner {
  float4 position [[position]];
  float2 uv;
};
vertex Corner corner(uint id [[vertex_id]], device const float4* places [[buffer(0)]]) {
  return Corner{places[id], places[id].xy};
}
[[host_name("pixel")]] fragment float4 pixel(Corner in [[stage_in]]) {
  float vertex_weight = 0.5f, fragments = 1;
  return float4(in.uv * vertex_weight, fragments, half(1));
}
