// Metal 4 tensors, cooperative tensors and matmul2d.
//
// A cooperative tensor is cut into 16 x 16 fragments, numbered row by row of the stored matrix; a lane holds
// eight elements of each, in the layout that MLX's kernels assume (BaseNAXFrag). Products run in float (int
// for integers) over ascending k.
#pragma once
#pragma clang system_header

#include "stdlib.h"

namespace metal {

constexpr size_t dynamic_extent = size_t(-1);

template <typename Index, size_t... E>
struct extents {
  using index_type = Index;
  Index sizes[sizeof...(E)];
  static constexpr size_t rank() {
    return sizeof...(E);
  }
  static constexpr size_t static_extent(size_t i) {
    constexpr size_t all[] = {E...};
    return all[i];
  }
  constexpr Index extent(size_t i) const {
    return sizes[i];
  }
  constexpr extents() : sizes{Index(E == dynamic_extent ? 0 : E)...} {}
  template <typename... I>
    requires(sizeof...(I) == sizeof...(E))
  constexpr extents(I... i) : sizes{Index(i)...} {}
};

template <typename Index, size_t rank, size_t... E>
struct dynamic_extents : dynamic_extents<Index, rank - 1, dynamic_extent, E...> {};
template <typename Index, size_t... E>
struct dynamic_extents<Index, 0, E...> {
  using type = extents<Index, E...>;
};
template <typename Index, size_t rank>
using dextents = typename dynamic_extents<Index, rank>::type;

struct tensor_inline {};
struct tensor_handle {};
struct tensor_offset {};

// Element (i, j, ...) is at i * strides[0] + j * strides[1] + ...; the first index runs fastest. T carries
// the address space of the elements.
template <typename T, typename Extents, typename Kind = tensor_handle>
struct tensor {
  using element_type = T;
  using value_type = lily::plain<T>;
  using extents_type = Extents;
  using index_type = typename Extents::index_type;
  static constexpr size_t rank = Extents::rank();

  T* elements = nullptr;
  Extents sizes{};
  array<index_type, rank> strides{};

  constexpr tensor() = default;
  constexpr tensor(T* elements, Extents sizes) : elements(elements), sizes(sizes) {
    index_type stride = 1;
    for (size_t i = 0; i < rank; ++i) {
      strides[i] = stride;
      stride *= sizes.extent(i);
    }
  }
  template <typename S>
  constexpr tensor(T* elements, Extents sizes, S given) : elements(elements), sizes(sizes) {
    for (size_t i = 0; i < rank; ++i) {
      strides[i] = index_type(given[i]);
    }
  }

  static constexpr size_t get_rank() {
    return rank;
  }
  constexpr index_type get_extent(size_t i) const {
    return sizes.extent(i);
  }
  template <size_t i>
  constexpr index_type get_extent() const {
    return sizes.extent(i);
  }
  constexpr index_type get_stride(size_t i) const {
    return strides[i];
  }
  constexpr T* data() const {
    return elements;
  }
  template <typename... I>
  constexpr T& get(I... i) const {
    return elements[offset(i...)];
  }
  template <typename... I>
  constexpr ptrdiff_t offset(I... i) const {
    ptrdiff_t at = 0;
    size_t dimension = 0;
    ((at += ptrdiff_t(i) * strides[dimension++]), ...);
    return at;
  }
  // The part from these offsets on, at most E elements along each dimension and never past the tensor's edge.
  template <size_t... E, typename... I>
  constexpr auto slice(I... at) const {
    if constexpr (sizeof...(E) == 0) {
      return part<extents<index_type, (sizeof(I), dynamic_extent)...>>(at...);
    } else {
      return part<extents<index_type, E...>>(at...);
    }
  }

 private:
  template <typename Part, typename... I>
  constexpr auto part(I... at) const {
    tensor<T, Part, tensor_inline> out;
    out.elements = elements + offset(at...);
    size_t i = 0;
    auto clip = [&](ptrdiff_t from) {
      ptrdiff_t left = ptrdiff_t(sizes.extent(i)) - from;
      if (Part::static_extent(i) != dynamic_extent && ptrdiff_t(Part::static_extent(i)) < left) {
        left = ptrdiff_t(Part::static_extent(i));
      }
      out.sizes.sizes[i] = index_type(left < 0 ? 0 : left);
      out.strides[i] = strides[i];
      ++i;
    };
    (clip(ptrdiff_t(at)), ...);
    return out;
  }
};

struct execution_thread {
  static constexpr int simdgroups = 1;
};
struct execution_simdgroup {
  static constexpr int simdgroups = 1;
};
template <int N>
struct execution_simdgroups {
  static constexpr int simdgroups = N;
};

} // namespace metal

namespace lily {

// Where a lane's element i of a 16 x 16 fragment is.
struct fragment_place {
  int row, column;
  constexpr fragment_place(uint lane, int i)
      : row(int((lane >> 2 & 4) | (lane >> 1 & 3)) + (i >> 2) * 8),
        column(int((lane >> 2 & 2) | (lane & 1)) * 4 + i % 4) {}
};

constexpr int fragments(int extent) {
  return (extent + 15) / 16;
}

// Rows x Columns elements, starting at (row0, column0) of the operand that several simdgroups share.
template <typename T, int Rows, int Columns>
struct cooperative_tensor {
  using element_type = T;
  using value_type = T;
  static constexpr bool is_cooperative = true;
  static constexpr int capacity = fragments(Rows) * fragments(Columns) * 8;

  T elements[capacity];
  int row0 = 0, column0 = 0;

  static constexpr uint16_t get_capacity() {
    return uint16_t(capacity);
  }
  constexpr T& operator[](int i) {
    check(i);
    return elements[i];
  }
  constexpr const T& operator[](int i) const {
    check(i);
    return elements[i];
  }
  constexpr T* begin() {
    return elements;
  }
  constexpr T* end() {
    return elements + capacity;
  }
  constexpr bool is_valid_element(int i) const {
    auto at = place(i);
    return at.row < Rows && at.column < Columns;
  }
  constexpr bool get_mask(int i) const {
    return is_valid_element(i);
  }
  // {column, row} of element i.
  auto get_multidimensional_index(int i) const {
    auto at = place(i);
    return metal::array<int, 2>{{at.column + column0, at.row + row0}};
  }
  // Elements beyond the tensor's edge are zero.
  template <typename Tensor>
  LILY_RT_INLINE void load(const Tensor& from) {
    for (int i = 0; i < capacity; ++i) {
      auto at = place(i);
      int row = at.row + row0, column = at.column + column0;
      bool inside = row < from.get_extent(1) && column < from.get_extent(0);
      elements[i] = inside && is_valid_element(i) ? cast<T>(from.get(column, row)) : T(0);
    }
  }
  template <typename Tensor>
  LILY_RT_INLINE void store(const Tensor& to) const {
    for (int i = 0; i < capacity; ++i) {
      auto at = place(i);
      int row = at.row + row0, column = at.column + column0;
      if (is_valid_element(i) && row < to.get_extent(1) && column < to.get_extent(0)) {
        to.get(column, row) = cast<typename Tensor::value_type>(elements[i]);
      }
    }
  }

 private:
  static constexpr void check(int i) {
    if (i < 0 || i >= capacity) {
      __builtin_trap();
    }
  }
  static fragment_place place(int i) {
    fragment_place at(rt::lane(), i % 8);
    at.row += i / 8 / fragments(Columns) * 16;
    at.column += i / 8 % fragments(Columns) * 16;
    return at;
  }
};

// One 16 x 32 block of the product: c += a b with a and b as they are stored.
template <typename Acc>
struct block_operands {
  Acc a[8], b[16], c[16];
};
template <bool transpose_a, bool transpose_b, typename Acc>
void multiply_block(block_operands<Acc>* lanes, rt::u32) {
  Acc a[16][16], b[16][32], c[16][32];
  for (uint lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 8; ++i) {
      fragment_place at(lane, i);
      (transpose_a ? a[at.column][at.row] : a[at.row][at.column]) = lanes[lane].a[i];
      for (int side = 0; side < 2; ++side) {
        Acc& to = transpose_b ? b[at.column][side * 16 + at.row] : b[at.row][side * 16 + at.column];
        to = lanes[lane].b[side * 8 + i];
        c[at.row][side * 16 + at.column] = lanes[lane].c[side * 8 + i];
      }
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 32; ++column) {
        if constexpr (is_real<Acc>) {
          c[row][column] = __builtin_fmaf(a[row][k], b[k][column], c[row][column]);
        } else {
          c[row][column] += a[row][k] * b[k][column];
        }
      }
    }
  }
  for (uint lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 16; ++i) {
      fragment_place at(lane, i % 8);
      lanes[lane].c[i] = c[at.row][i / 8 * 16 + at.column];
    }
  }
}

template <typename T>
concept Cooperative = requires { T::is_cooperative; };

} // namespace lily

namespace mpp::tensor_ops {

using metal::dynamic_extent;
template <typename T>
constexpr T dynamic_length_v = T(0);

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(
      int m,
      int n,
      int k = 0,
      bool transpose_left = false,
      bool transpose_right = false,
      bool relaxed_precision = false,
      mode matmul_mode = mode::multiply)
      : m(m),
        n(n),
        k(k),
        transpose_left(transpose_left),
        transpose_right(transpose_right),
        relaxed_precision(relaxed_precision),
        matmul_mode(matmul_mode) {}
};

// Several simdgroups share a product by rows if those divide into whole fragments, else by columns.
template <matmul2d_descriptor desc, typename Scope>
struct matmul2d {
  static constexpr int S = Scope::simdgroups;
  static constexpr bool by_rows = desc.m % (16 * S) == 0;
  static_assert(by_rows || desc.n % (16 * S) == 0, "the product does not divide among its simdgroups");
  static constexpr int M = by_rows ? desc.m / S : desc.m;
  static constexpr int N = by_rows ? desc.n : desc.n / S;
  static constexpr int K = desc.k > 0 ? desc.k : 16; // one step of a product whose k is known when it runs
  static constexpr bool TA = desc.transpose_left, TB = desc.transpose_right;
  template <typename T>
  using left_t = lily::cooperative_tensor<T, TA ? K : M, TA ? M : K>;
  template <typename T>
  using right_t = lily::cooperative_tensor<T, TB ? N : K, TB ? K : N>;
  template <typename T>
  using destination_t = lily::cooperative_tensor<T, M, N>;

  template <typename A, typename B, typename C>
  auto get_left_input_cooperative_tensor() const {
    return left<lily::plain<A>>(0);
  }
  template <typename A, typename B, typename C>
  auto get_right_input_cooperative_tensor() const {
    return right<lily::plain<B>>(0);
  }
  template <typename A, typename B, typename C>
  auto get_destination_cooperative_tensor() const {
    destination_t<lily::plain<C>> out{};
    (by_rows ? out.row0 : out.column0) = part() * (by_rows ? M : N);
    return out;
  }

  template <typename A, typename B, typename C>
  LILY_RT_INLINE void run(A& a, B& b, C& c, int line = __builtin_LINE()) const {
    if constexpr (!lily::Cooperative<C>) {
      auto registers = get_destination_cooperative_tensor<A, B, typename C::value_type>();
      if (desc.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate) {
        registers.load(c);
      }
      run(a, b, registers, line);
      registers.store(c);
    } else if constexpr (lily::Cooperative<A> && lily::Cooperative<B>) {
      product(a, b, c, desc.matmul_mode == matmul2d_descriptor::mode::multiply, line);
    } else {
      int length = K;
      if constexpr (!lily::Cooperative<A> && desc.k <= 0) {
        length = int(a.get_extent(TA ? 1 : 0));
      }
      for (int k = 0; k < length; k += K) {
        bool fresh = k == 0 && desc.matmul_mode == matmul2d_descriptor::mode::multiply;
        product(operand<true>(a, k), operand<false>(b, k), c, fresh, line);
      }
    }
  }

 private:
  static int part() {
    return S == 1 ? 0 : int(lily::rt::thread().simdgroup_index_in_threadgroup) % S;
  }
  template <typename T>
  static auto left(int k) {
    left_t<T> out{};
    int m = by_rows ? part() * M : 0;
    out.row0 = TA ? k : m;
    out.column0 = TA ? m : k;
    return out;
  }
  template <typename T>
  static auto right(int k) {
    right_t<T> out{};
    int n = by_rows ? 0 : part() * N;
    out.row0 = TB ? n : k;
    out.column0 = TB ? k : n;
    return out;
  }
  template <bool is_left, typename X>
  LILY_RT_INLINE static auto operand(X& x, int k) {
    if constexpr (lily::Cooperative<X>) {
      return x;
    } else {
      auto out = [&] {
        if constexpr (is_left) {
          return left<typename X::value_type>(k);
        } else {
          return right<typename X::value_type>(k);
        }
      }();
      out.load(x);
      return out;
    }
  }
  template <typename A, typename B, typename C>
  LILY_RT_INLINE static void product(const A& a, const B& b, C& c, bool fresh, int line) {
    using lily::fragments;
    constexpr bool whole = lily::Integer<typename A::value_type> && lily::Integer<typename B::value_type>;
    using Acc = metal::conditional_t<whole, int, float>;
    constexpr int KF = fragments(K), MF = fragments(M), NF = fragments(N);
    for (int m = 0; m < MF; ++m) {
      for (int n = 0; n < NF; n += 2) {
        lily::block_operands<Acc> mine{};
        auto halves = [&](auto&& each) {
          for (int i = 0; i < 16 && n + i / 8 < NF; ++i) {
            each(i, n + i / 8);
          }
        };
        if (!fresh) {
          halves([&](int i, int at) { mine.c[i] = Acc(c.elements[(m * NF + at) * 8 + i % 8]); });
        }
        for (int k = 0; k < KF; ++k) {
          for (int i = 0; i < 8; ++i) {
            mine.a[i] = Acc(a.elements[(TA ? k * MF + m : m * KF + k) * 8 + i]);
          }
          halves([&](int i, int at) {
            int fragment = TB ? at * KF + k : k * NF + at;
            mine.b[i] = Acc(b.elements[fragment * 8 + i % 8]);
          });
          mine = lily::rt::simd_combine("matmul2d", line, mine, lily::multiply_block<TA, TB, Acc>);
        }
        halves([&](int i, int at) {
          auto& element = c.elements[(m * NF + at) * 8 + i % 8];
          element = lily::cast<lily::plain<decltype(element)>>(mine.c[i]);
        });
      }
    }
  }
};

} // namespace mpp::tensor_ops
