// One value a thread from every primitive of the prelude, for tests against NumPy.
//
//   x       [N] f32     one value a thread
//   words   [N] u32
//   pairs   [N, 8] T    vectors
//   halves  [N, 8] S    vectors of a 16-bit type
//   floats  [28, N] f32, ints [10, N] u32, vectors [N, 8] T, swapped [N] f32
//   counts  [8] u32, signed_counts [8] i32, both zero at the start
//
// One threadgroup of N threads, so N is at most 1,024.

template <typename T>
LILY_INLINE void floats_of(f32 x, u32 word, LILY_DEVICE f32* floats, uint thread_index, uint threads, uint lane) {
  const f32 three_down = lily_shuffle_down(x, 3);
  f32 results[28];
  results[0] = lily_simd_sum(x);
  results[1] = lily_simd_max(x);
  results[2] = lily_simd_min(x);
  results[3] = lily_simd_prefix_sum(x);
  results[4] = lily_shuffle(x, (lane * 7) % 32);
  results[5] = lily_shuffle_xor(x, 5);
  results[6] = lane < 29 ? three_down : x;
  results[7] = lily_broadcast_first(x);
  results[8] = lily_exp(x);
  results[9] = lily_log(lily_max(x, -x));
  results[10] = lily_rsqrt(lily_max(x, -x));
  results[11] = lily_fast_exp(x);
  results[12] = lily_fast_exp2(x);
  results[13] = lily_fast_log(lily_max(x, -x));
  results[14] = lily_fast_rsqrt(lily_max(x, -x));
  results[15] = lily_fma(x, x, 1.0f);
  results[16] = lily_min(x, 0.5f);
  results[17] = lily_to_f32(lily_from_f32<T>(x));
  results[18] = lily_f32_from_bits(lily_bits_from_f32(x) ^ 0x80000000u);
  results[19] = lily_nibble_f32(word, 5);
  results[20] = lily_nibble_f32(word, 0) + 16.0f * lily_nibble_f32(word, 7);
  results[21] = lily_byte_f32(word, 0) + 256.0f * lily_byte_f32(word, 1);
  results[22] = lily_byte_f32(word, 2) + 256.0f * lily_byte_f32(word, 3);
  results[23] = x < 0.0f ? -LILY_INFINITY : LILY_INFINITY;
  results[24] = lily_to_f32(bf16(lily_from_f32<bf16>(x)));
  results[25] = lily_to_f32(fp16(lily_from_f32<fp16>(x)));
  results[26] = lily_cos(1000.0f * x);
  results[27] = lily_sin(1000.0f * x);
  LILY_UNROLL
  for (int i = 0; i < 28; ++i) {
    floats[uint(i) * threads + thread_index] = results[i];
  }
}

LILY_TABLE u32 PRIMES[4] = {2, 3, 5, 7};

LILY_INLINE void ints_of(
    f32 x,
    u32 word,
    LILY_THREADGROUP u32* shared,
    LILY_DEVICE u32* ints,
    LILY_DEVICE u32* counts,
    LILY_DEVICE i32* signed_counts,
    uint thread_index,
    uint threads,
    uint lane) {
  u32 results[10];
  results[0] = lily_ballot(x > 0.0f);
  results[1] = lily_simd_any(x > 2.0f) ? 1 : 0;
  results[2] = lily_simd_all(x > -2.0f) ? 1 : 0;
  results[3] = lily_popcount(word);
  results[4] = lily_simd_sum(word % 1000u);
  results[5] = lily_simd_prefix_sum(word % 1000u);
  results[6] = lily_simd_max(i32(word % 1000u) - 500) < 0 ? 0 : 1;
  results[7] = PRIMES[lane % 4];

  // The word of the next thread, and how many threads of the threadgroup have an odd word.
  shared[thread_index] = word;
  if (thread_index == 0) {
    shared[threads] = 0;
  }
  lily_threadgroup_barrier();
  results[8] = shared[(thread_index + 1) % threads];
  lily_atomic_add(shared + threads, word % 2);
  lily_threadgroup_barrier();
  results[9] = shared[threads];
  lily_atomic_add(counts + word % 8, 1u);
  lily_atomic_add(signed_counts + word % 8, -1);
  LILY_UNROLL
  for (int i = 0; i < 10; ++i) {
    ints[uint(i) * threads + thread_index] = results[i];
  }
}

// Doubles eight values through every width of vector, in device and in threadgroup memory.
template <typename T>
LILY_INLINE void vectors_of(
    LILY_DEVICE const T* source, LILY_DEVICE T* target, LILY_THREADGROUP T* shared, uint thread_index) {
  f32 values[8];
  lily_unpack(lily_load<8>(source), values);
  LILY_UNROLL
  for (int i = 0; i < 8; ++i) {
    values[i] *= 2.0f;
  }
  LILY_THREADGROUP T* mine = shared + thread_index * 8;
  lily_store<8>(mine, lily_pack<T, 8>(values));
  lily_simdgroup_barrier();
  f32 halves[4];
  lily_unpack(lily_load<4>(mine), halves);
  lily_store<4>(target, lily_pack<T, 4>(halves));
  f32 quarters[2];
  lily_unpack(lily_load<2>(mine + 4), quarters);
  lily_store<2>(target + 4, lily_pack<T, 2>(quarters));
  f32 single[1];
  lily_unpack(lily_load<1>(mine + 6), single);
  lily_store<1>(target + 6, lily_pack<T, 1>(single));
  target[7] = mine[7];
}

// The words of a 16-byte vector of 16-bit floats, taken apart and put together.
template <typename T>
LILY_INLINE f32 swapped_sum(LILY_DEVICE const T* source) {
  const lily_vec<T, 8> vec = lily_load<8>(source);
  f32 sum = 0.0f;
  LILY_UNROLL
  for (int i = 0; i < 4; ++i) {
    const u32 word = lily_word(vec, i);
    const u32 swapped = lily_pack2<T>(lily_unpack2_high<T>(word), lily_unpack2_low<T>(word));
    sum += f32(i + 1) * (lily_unpack2_low<T>(swapped) - lily_unpack2_high<T>(swapped));
  }
  return sum;
}

// ---- body ----
LILY_THREADGROUP_ARRAY(u32, shared, N + 1);
LILY_THREADGROUP_ARRAY(T, shared_vectors, N * 8);
const uint thread_index = thread_index_in_threadgroup;
floats_of<T>(x[thread_index], words[thread_index], floats, thread_index, N, thread_index_in_simdgroup);
ints_of(
    x[thread_index], words[thread_index], shared, ints, counts, signed_counts, thread_index, N,
    thread_index_in_simdgroup);
vectors_of<T>(pairs + thread_index * 8, vectors + thread_index * 8, shared_vectors, thread_index);
swapped[thread_index] = swapped_sum<S>(halves + thread_index * 8);
lily_threadgroup_barrier_device();
