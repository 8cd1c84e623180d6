"""The strict pass against planted errors and against kernels that Apple's compiler accepts."""

import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import kernels
from mlx_lm.models import gated_delta

from lily_mlx.launch import source, strict, trace

CORPUS = sorted((Path(__file__).parent / "strict_corpus").glob("*.metal"))
_EXPECTED = re.compile(r"// error: ([\w-]+)")

MLX_KERNELS = Path("mlx/backend/metal/kernels")


def planted(path):
    """(line, rule) of each error that the file's comments announce."""
    lines = enumerate(path.read_text().splitlines(), start=1)
    return [(number, rule) for number, line in lines for rule in _EXPECTED.findall(line)]


# --- Errors -------------------------------------------------------------------------------------------------


def test_the_corpus_is_large_and_covers_every_rule():
    assert len(CORPUS) >= 150
    assert all(planted(path) for path in CORPUS)
    assert {rule for path in CORPUS for _, rule in planted(path)} == set(strict.RULES)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_planted_error_is_reported_where_it_is_and_nothing_else(path):
    found = strict.check_file(path)
    assert [(d.line, d.rule) for d in found] == planted(path), found
    assert {d.file for d in found} == {str(path)}


def test_the_threads_of_a_launch_are_checked():
    call = {
        "input_names": ["x"],
        "output_names": ["y"],
        "inputs": [mx.zeros((2048,))],
        "output_shapes": [(2048,)],
        "output_dtypes": [mx.float32],
        "grid": (2048, 1, 1),
    }
    body = "uint i = thread_position_in_grid.x;\ny[i] = x[i];"
    assert strict.check("copy", body, **call, threadgroup=(32, 32, 1)) == []
    (found,) = strict.check("copy", body, **call, threadgroup=(32, 32, 2))
    assert found.rule == "threads"


def test_lines_are_those_of_header_and_body():
    header = "// The square.\ninline float square(float v) {\n  double w = v;\n  return w * w;\n}\n"
    body = "uint i = thread_position_in_grid.x;\ny[i] = square(x[i]);"
    call = {
        "input_names": ["x"],
        "output_names": ["y"],
        "inputs": [mx.zeros((8,))],
        "output_shapes": [(8,)],
        "output_dtypes": [mx.float32],
    }
    assert [str(d) for d in strict.check("k", body, header, **call)] == [
        "k.h:3: double: 'double' is not supported in Metal"
    ]
    assert strict.check("k", body, header.replace("double", "float"), **call) == []
    (found,) = strict.check("k", "uint i = thread_position_in_grid.x;\n\ny[i] = cube(x[i]);", **call)
    assert (found.file, found.line, found.rule) == ("k.metal", 3, "undeclared")
    (found,) = strict.check("k", '#line 40 "elsewhere.metal"\ny[0] = std::max(x[0], x[1]);', **call)
    assert (found.file, found.line, found.rule) == ("elsewhere.metal", 40, "std-namespace")


def test_a_template_is_checked_as_it_is_instantiated():
    call = {
        "input_names": ["x"],
        "output_names": ["y"],
        "inputs": [mx.zeros((64,))],
        "output_shapes": [(64,)],
        "output_dtypes": [mx.float32],
    }
    body = "threadgroup T tile[N];\ntile[0] = T(x[0]);\ny[0] = float(tile[0]);"
    assert strict.check("k", body, **call, template=[("T", mx.float16), ("N", 16384)]) == []
    (found,) = strict.check("k", body, **call, template=[("T", mx.float32), ("N", 16384)])
    assert (found.line, found.rule) == (1, "threadgroup-memory")
    assert "65536 bytes" in found.message


def test_a_file_may_ask_for_a_newer_metal(tmp_path):
    path = tmp_path / "new.metal"
    source = (
        "#include <metal_stdlib>\nusing namespace metal;\n"
        "kernel void k(device float* x [[buffer(0)]]) {\n"
        "  auto square = [](float v) { return v * v; };\n  x[0] = square(x[0]);\n}\n"
    )
    path.write_text(source)
    assert [d.rule for d in strict.check_file(path)] == ["lambda"]
    assert strict.check_file(path, metal="3.2") == []
    path.write_text("// requires: metal 3.2\n" + source)
    assert strict.check_file(path) == []


# --- Sources without errors ---------------------------------------------------------------------------------

ACCEPTED = r"""
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

#define UNROLL _Pragma("clang loop unroll(full)")
#if __METAL_VERSION__ >= 400
double only_what_is_compiled_counts;
#endif

constant constexpr const int LANES = 32;
constant bool has_mask [[function_constant(0)]];
static constant float TABLE[4] = {0.0f, 1.0f, 2.0f, 3.0f};  // double, virtual: words of a comment
constant char* const NAME = "virtual double";

// A reference to a pointer, an overload that calls another, a template that calls itself.
inline void advance(device const float*& p, int n) { p += n; }
inline float total(float x) { return x; }
inline float total(float2 v) { return total(v.x) + total(v.y); }
template <int N>
inline float power(float x) {
  if constexpr (N == 0) {
    return 1.0f;
  } else {
    return x * power<N - 1>(x);
  }
}

template <typename T>
struct Accumulator {
  static constant constexpr const int WIDTH = 4;
  T values[WIDTH];
  Accumulator() thread : values{T(0), T(0), T(0), T(0)} {}
  thread T& operator[](int i) thread { return values[i]; }
  const thread T& operator[](int i) const thread { return values[i]; }
  void add(thread const T* other) {
    UNROLL
    for (int i = 0; i < WIDTH; ++i) {
      values[i] += other[i];
    }
  }
};

struct Sizes {
  int rows, columns;
  int count() const constant { return rows * columns; }
};

union Bits {
  float value;
  uint bits;
};

template <typename T, int ROWS>
[[kernel, max_total_threads_per_threadgroup(1024)]] void tile(
    const device T* x [[buffer(0)]],
    device T* y [[buffer(1)]],
    constant Sizes& sizes [[buffer(2)]],
    device atomic_uint* counter [[buffer(3)]],
    const device bool* mask [[buffer(4), function_constant(has_mask)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint3 position [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int per_lane = ROWS * LANES / 32;
  threadgroup T whole[8192];
  threadgroup float *rows = shared + lane, *other = rows;
  const int a = sizes.rows, b = sizes.columns, product = a * b;
  if (a & b || lane * per_lane > 4 && !(a < b)) {
    return;
  }
  Accumulator<float> sums;
  float parts[4] = {1.0, 2.0f, 3e-2, 0.5h};
  sums.add(parts);
  auto& first = x[position.x];
  Bits bits{float(first)};
  whole[lane] = T(bits.value * TABLE[product % 4]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  device const uint* words = (device const uint*)(x + position.x);
  uint32_t word = *(device const uint32_t*)words;
  const ulong wide = 0xFFul + sizes.count() + word;
  atomic_fetch_add_explicit(counter, uint(wide), memory_order_relaxed);
  simdgroup_matrix<float, 8, 8> block = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_store(block, rows, 8);
  float4 v = float4(float2(parts[0], sums[1]), simd_sum(other[0]), power<3>(2.0f));
  v.xy = v.zw * total(v.xy);
  y[position.x] = T(v.x) + T(has_mask && mask[lane] ? 1 : 0);
}

template [[host_name("tile_half")]] [[kernel]] decltype(tile<half, 4>) tile<half, 4>;
template [[host_name("tile_bfloat")]] [[kernel]] decltype(tile<bfloat, 4>) tile<bfloat, 4>;
"""


def test_what_metal_accepts_is_accepted():
    assert strict.check_text(ACCEPTED, "accepted.metal") == []


def test_unusual_metal_is_accepted():
    assert strict.check_file(Path(__file__).parent / "strict_unusual.metal") == []


def test_the_buffers_of_a_signature_are_counted():
    def check(count):
        names = [f"x{n}" for n in range(count)]
        return strict.check(
            "k",
            f"out[0] = {' + '.join(f'{name}[0]' for name in names)};",
            input_names=names,
            output_names=["out"],
            inputs=[mx.zeros((8,))] * count,
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )

    assert check(30) == []
    (found,) = check(31)
    assert found.rule == "buffer-index"


def test_this_projects_kernels_pass():
    """One of each kind: ``lily-mlx kernels check``, which CI runs as well, takes all of them."""
    stems = ["attention_combine", "expert_down", "expert_route", "gated_delta_scan", "qmm"]
    assert strict.check_kernels(stems) == []


def source_of(fn, *inputs):
    """Complete source of the one custom kernel that ``fn`` runs, with MLX's own header before it."""
    (found,) = [p for p in trace.primitives(fn, *inputs) if p.source]
    return f'#include "{MLX_KERNELS}/utils.h"\n#line 1 "kernel.metal"\n{found.source}'


def delta_inputs(vector_gate, masked, key_size=128):
    q = mx.zeros((1, 3, 2, key_size), mx.bfloat16)
    g = mx.zeros((1, 3, 4, key_size) if vector_gate else (1, 3, 4))
    arrays = [
        q,
        q,
        mx.zeros((1, 3, 4, 64), mx.bfloat16),
        g,
        mx.zeros((1, 3, 4)),
        mx.zeros((1, 4, 64, key_size)),
    ]
    return [*arrays, mx.zeros((1, 3), mx.bool_)] if masked else arrays


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("vector_gate", [False, True])
def test_mlx_lm_gated_delta_kernels_pass(vector_gate, masked):
    inputs = delta_inputs(vector_gate, masked)
    for kernel in (gated_delta.gated_delta_kernel, gated_delta.gated_delta_kernel_unpacked):
        assert strict.check_text(source_of(kernel, *inputs), "kernel.metal") == []


def bf16(*shape):
    return mx.zeros(shape, mx.bfloat16)


FUSED = {
    "expert_routing": lambda: kernels.expert_routing(
        bf16(3, 64), mx.zeros((64,)), top_k=4, multiplier=1.0, score_eps=1e-6, route_scale=1.0
    ),
    "norm_add_norm": lambda: kernels.norm_add_norm(
        bf16(3, 512),
        mx.zeros((3, 512)),
        alpha=mx.zeros((512,)),
        beta=mx.zeros((512,)),
        post_weight=bf16(512),
        post_eps=1e-6,
        next_norm=nn.RMSNorm(512),
    ),
    "pre_norm": lambda: kernels.pre_norm(mx.zeros((3, 512)), nn.RMSNorm(512), dtype=mx.bfloat16),
    "post_expert_norm_combine": lambda: kernels.post_expert_norm_combine(
        bf16(3, 4, 512), mx.zeros((3, 4)), norm_weight=bf16(512), eps=1e-6
    ),
    "qk_norm": lambda: kernels.qk_norm(
        bf16(1, 3, 2 * 6 * 64), n_heads=4, n_kv_heads=2, head_dim=64, eps=1e-6, query_scale=1.0
    ),
    "qk_norm_rope": lambda: kernels.qk_norm_rope(
        bf16(1, 3, 2 * 6 * 64),
        n_heads=4,
        n_kv_heads=2,
        head_dim=64,
        eps=1e-6,
        query_scale=1.0,
        rope_base=1e4,
        offset=5,
    ),
    "rms_norm_sigmoid_gate": lambda: kernels.rms_norm_sigmoid_gate(
        bf16(1, 4, 3, 64), bf16(1, 3, 256), eps=1e-6
    ),
}


def test_every_fused_kernel_of_mlx_lm_has_a_case():
    assert set(kernels.__all__) == set(FUSED)


@pytest.mark.parametrize("name", FUSED)
def test_mlx_lm_fused_kernels_pass(name):
    assert strict.check_text(source_of(FUSED[name]), "kernel.metal") == []


GROUPS = {
    "quantized": ["steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"],
    "fp_quantized": ["steel/gemm/gemm.h", "quantized_utils.h", "fp4.h", "fp8.h", "fp_quantized.h"],
    "vector attention": ["sdpa_vector.h", "sdpa_blocked.h"],
    "full attention": ["steel/attn/kernels/steel_attention.h"],
    "gemm": ["steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_fused.h"],
    "gather gemm": ["steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_gather.h"],
    "gemv": ["gemv.h"],
    "convolution": ["steel/conv/conv.h", "steel/conv/kernels/steel_conv.h"],
    "elementwise": ["unary_ops.h", "binary_ops.h", "ternary_ops.h", "unary.h", "binary.h", "copy.h"],
    "reduction": ["atomic.h", "reduction/ops.h", "reduce.h", "scan.h", "logsumexp.h"],
    "sort": ["sort.h"],
    "gated delta": ["gated_delta_update.h", "gated_delta_update_vjp.h"],
}


@pytest.mark.parametrize("group", GROUPS)
def test_mlx_headers_pass(group):
    """MLX's own kernels, as far as they are in the wheel: templates that are not instantiated are parsed."""
    text = "#include <metal_stdlib>\nusing namespace metal;\n"
    text += "".join(f'#include "{MLX_KERNELS}/{name}"\n' for name in ["utils.h", *GROUPS[group]])
    assert strict.check_text(text, "group.metal", report_includes=True) == []


REALS = ["half", "bfloat16_t", "float"]
INTEGERS = ["int8_t", "uint8_t", "int16_t", "uint16_t", "int32_t", "uint32_t", "int64_t", "uint64_t"]


OPERATORS = {
    "unary_ops.h": [
        (
            "x[0] = {}()(x[1]);",
            "ArcCos ArcSinh Cos Erf ErfInv Exp Expm1 Log Log2 Log1p Round Sigmoid Sin Sqrt Rsqrt Tan Tanh",
            REALS,
        ),
        ("x[0] = {}()(x[1]);", "Abs Ceil Floor Negative Sign Square", [*REALS, *INTEGERS]),
        ("x[0] = {}()(x[1]);", "Abs Cos Exp Log Negative Rsqrt Sign Sqrt", ["complex64_t"]),
    ],
    "binary_ops.h": [
        (
            "x[0] = {}()(x[1], x[2]);",
            "Add Divide FloorDivide Maximum Minimum Multiply Power Remainder Subtract",
            [*REALS, *INTEGERS],
        ),
        ("x[0] = {}()(x[1], x[2]);", "ArcTan2 LogAddExp", REALS),
        ("x[0] = {}()(x[1], x[2]);", "BitwiseAnd LeftShift RightShift", INTEGERS),
    ],
    "reduction/ops.h": [
        (
            "{}<T> f; x[0] = f.simd_reduce(x[1]); x[0] = f(x[1], x[2]);",
            "Max Min Prod Sum",
            [*REALS, *INTEGERS],
        ),
    ],
    "scan.h": [
        (
            "{}<T> f; x[0] = f.simd_scan(x[1]); x[0] = f(x[1], x[2]);",
            "CumMax CumProd CumSum",
            [*REALS, *INTEGERS],
        ),
    ],
}


@pytest.mark.parametrize("header", OPERATORS)
def test_mlx_operators_pass_for_every_type(header):
    """Of a template that is not instantiated a call with mixed types is not seen."""
    text = "#include <metal_stdlib>\nusing namespace metal;\n"
    text += "".join(f'#include "{MLX_KERNELS}/{name}"\n' for name in ["utils.h", "atomic.h", header])
    for body, operators, types in OPERATORS[header]:
        for operator in operators.split():
            for kind in types:
                function = f"{operator}_{kind}_{len(types)}".lower()
                text += f"void {function}(device {kind}* x) {{ using T = {kind}; {body.format(operator)} }}\n"
    assert strict.check_text(text, "operators.metal", report_includes=True) == []


def test_mlx_tensor_kernels_pass_for_metal_4():
    names = ["utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "steel/gemm/gemm_nax.h", "quantized_nax.h"]
    text = "#include <metal_stdlib>\nusing namespace metal;\n"
    text += "".join(f'#include "{MLX_KERNELS}/{name}"\n' for name in names)
    assert strict.check_text(text, "nax.metal", metal="4.0", report_includes=True) == []
    assert "metal-version" in {d.rule for d in strict.check_text(text, "nax.metal", report_includes=True)}


# --- The command --------------------------------------------------------------------------------------------


def test_the_command_prints_errors_and_returns_a_status(capsys):
    path = CORPUS[0]
    assert strict.main_check([str(path)]) == 1
    (line, rule), *_ = planted(path)
    assert capsys.readouterr().out.startswith(f"{path}:{line}: {rule}: ")
    assert strict.main_check([str(source.KERNELS / "gated_delta_scan.metal")]) == 0
    assert capsys.readouterr().out == "no errors\n"


def test_the_command_checks_folders(tmp_path):
    with pytest.raises(strict.UsageError, match=r"no \.metal files"):
        strict.main_check([str(tmp_path)])
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.metal").write_text(CORPUS[0].read_text())
    assert strict.main_check([str(tmp_path)]) == 1


def test_a_missing_include_is_an_error_of_its_line():
    (found,) = strict.check_text('#include <metal_stdlib>\n#include "absent.h"\n', "a.metal")
    assert str(found) == 'a.metal:2: include: there is no "absent.h"'
    assert strict.check_text('#if 0\n#include "absent.h"\n#endif\n', "a.metal") == []


def test_a_compiler_that_fails_is_not_taken_for_a_source_that_passes(monkeypatch):
    monkeypatch.setattr(strict, "_FLAGS", ("--no-such-flag",))
    with pytest.raises(RuntimeError, match="compiler failed"):
        strict.check_text("kernel void k() {}\n", "a.metal", metal="3.9")


@pytest.mark.parametrize(("variants", "lines"), [("a", []), ("ab", [3]), ("ac", [3]), ("ba", [3])])
def test_variants_are_checked_together_and_none_is_lost(variants, lines, monkeypatch):
    """Of c MLX makes a function with a's name and another signature: few elements are in constant memory."""
    kinds = {"a": (mx.float32, 8), "b": (mx.float16, 8), "c": (mx.float32, 4)}
    header = "template <typename T, typename P>\nT first(P p) {\n  return p[0] + T::absent;\n}\n"
    header += "template <>\ninline float first(const device float* p) { return p[0]; }\n"
    call = {"input_names": ["x"], "output_names": ["y"]}
    call |= {"output_shapes": [(8,)], "output_dtypes": [mx.float32]}

    def calls(_):
        for kind, size in map(kinds.get, variants):
            given = {"inputs": [mx.zeros((size,), kind)], "template": [("T", kind)]}
            yield "k", header, "y[0] = first<T>(x);", call | given

    monkeypatch.setattr(strict, "_kernel_calls", calls)
    assert [(d.file, d.line) for d in strict.check_kernels()] == [("k.h", line) for line in lines]
