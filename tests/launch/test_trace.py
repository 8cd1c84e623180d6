"""The trace against graphs counted by hand, against MLX's own fusion and against stock layers."""

import io
import re
from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.models import gated_delta, qwen3_5, qwen3_5_moe

from lily_mlx.launch import backend, trace
from lily_mlx.ops.expert_combine import expert_combine


def traced(fn, *inputs):
    found = trace.primitives(fn, *inputs)
    return [p for p in found if p.dispatches], trace.summary(found)


def constant(shape, dtype):
    """An evaluated array of any size that takes no memory."""
    array = mx.broadcast_to(mx.zeros((), dtype), shape)
    mx.eval(array)
    return array


# --- Three graphs counted by hand ---------------------------------------------------------------------------


def test_views_are_free_and_a_reshape_of_a_transpose_copies():
    def fn(x):  # x [4, 6] float32, 96 bytes
        column = x.T.reshape(24)  # Transpose: view. Reshape: the strides (1, 6) are not one run: a copy
        row = x[1:3].reshape(12)[None]  # Slice, Reshape of contiguous rows, ExpandDims: views
        return mx.exp(column), row + 1.0  # Exp and Add: one kernel each; Broadcast of 1.0: view

    found, total = traced(fn, mx.zeros((4, 6)))
    assert sorted(p.name for p in found) == ["Add", "Exp", "Reshape"]
    # The copy, then Exp: two in a row. Add waits for nothing.
    assert (total.primitives, total.dispatches, total.stages, total.chain) == (3, 3, 2, 2)
    # Copy 96 and Exp 96; Add reads its 12 elements, 48 bytes, and the scalar's 4.
    assert total.bytes_read == 96 + 96 + 48 + 4
    assert total.bytes_written == 96 + 96 + 48


def test_a_cache_is_updated_in_place_unless_the_old_one_is_still_read():
    cache, new = mx.zeros((1, 2, 64, 8), mx.float16), mx.zeros((1, 2, 1, 8), mx.float16)

    def rebound(cache, new):
        cache[..., 10:11, :] = new
        return cache

    def kept(cache, new):
        old = cache[..., :10, :].sum()
        cache[..., 10:11, :] = new
        return cache, old

    found, total = traced(rebound, cache, new)
    # 2 x 8 halves are read and written; the 2,048 bytes of the cache stay where they are.
    assert [(p.name, p.dispatches, p.bytes_read, p.bytes_written) for p in found] == [
        ("SliceUpdate", 1, 32, 32)
    ]
    assert total.stages == 1

    found, total = traced(kept, cache, new)
    update = next(p for p in found if p.name == "SliceUpdate")
    assert (update.dispatches, update.stages) == (2, 2)
    assert (update.bytes_read, update.bytes_written) == (32 + 2048, 32 + 2048)


def test_a_compiled_group_is_one_kernel_on_the_longest_chain():
    @mx.compile
    def swiglu(gate, up):
        return nn.silu(gate) * up

    weight = mx.zeros((512, 64))
    packed, scales, biases = mx.quantize(weight, 64, 4)
    mx.eval(packed, scales, biases)

    def fn(x):  # x [1, 64] float32
        def project():
            return mx.quantized_matmul(x, packed, scales, biases, group_size=64, bits=4)

        # The two products do not wait for each other, the group waits for both, Softmax for the group.
        return mx.softmax(swiglu(project(), project() * 2), axis=-1)

    found, total = traced(fn, mx.zeros((1, 64)))
    # MLX's export merges the two equal products.
    assert Counter(p.name for p in found) == {
        "QuantizedMatmul": 1,
        "Multiply": 1,
        "Compiled": 1,
        "Softmax": 1,
    }
    assert (total.dispatches, total.stages) == (4, 4)
    group = next(p for p in found if p.name == "Compiled")
    assert Counter(group.fused) == {"Sigmoid": 1, "Multiply": 2}
    # x 256 bytes; 512 rows of 32 bytes of weights, 4 of scale, 4 of bias; then 2,048 bytes an array of 512.
    product = 256 + 512 * (32 + 4 + 4)
    assert total.bytes_read == product + (2048 + 4) + 2 * 2048 + 2048
    assert total.bytes_written == 4 * 2048


# --- Rules --------------------------------------------------------------------------------------------------


def test_a_concatenation_copies_each_input_at_once():
    found, _ = traced(lambda a, b: mx.concatenate([a, b, a]), mx.zeros((2, 4)), mx.zeros((3, 4)))
    assert [(p.name, p.dispatches, p.stages) for p in found] == [("Concatenate", 3, 1)]


@pytest.mark.parametrize(
    ("n", "launches"),
    [(256, 1), (2048, 1), (2049, 4), (5000, 6)],
    ids=["one threadgroup", "the last that fits", "two blocks: one merge", "three blocks: two merges"],
)
def test_a_long_row_is_sorted_in_blocks(n, launches):
    # Blocks, then partition and merge a round, then a copy out: 2 + 2 log2(blocks).
    found, _ = traced(lambda x: mx.argpartition(x, 8), mx.zeros((1, n)))
    assert [(p.name, p.dispatches) for p in found] == [("ArgPartition", launches)]


@pytest.mark.parametrize(
    ("shape", "axis", "launches"),
    [((64, 64), None, 1), ((64, 65), None, 2), ((4, 300), 1, 1), ((8, 300), 0, 1), ((300, 64), 0, 2)],
    ids=["all, one pass", "all, two passes", "rows", "few columns", "long columns, two passes"],
)
def test_a_reduction_takes_one_or_two_passes(shape, axis, launches):
    found, _ = traced(lambda x: x.sum(axis), mx.zeros(shape))
    assert [(p.name, p.dispatches) for p in found] == [("Reduce", launches)]


@pytest.mark.parametrize(("keys", "launches"), [(1023, 1), (1024, 2)])
def test_attention_over_many_keys_takes_two_passes(keys, launches):
    def fn(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0)

    kv = mx.zeros((1, 2, keys, 256), mx.bfloat16)
    found, _ = traced(fn, mx.zeros((1, 16, 1, 256), mx.bfloat16), kv, kv)
    assert [(p.name, p.dispatches) for p in found] == [("ScaledDotProductAttention", launches)]


def test_attention_without_a_kernel_is_mlx_own_expansion():
    def fn(q, k):  # head size 256, 64 queries: MLX multiplies, masks, normalises, multiplies
        return mx.fast.scaled_dot_product_attention(q, k, k, scale=1.0, mask="causal")

    found, _ = traced(fn, mx.zeros((1, 4, 64, 256)), mx.zeros((1, 4, 64, 256)))
    names = Counter(p.name for p in found)
    assert names["Matmul"] == 2
    assert names["Softmax"] == 1
    assert "ScaledDotProductAttention" not in names


def test_contiguous_shares_a_buffer_of_almost_the_same_size():
    small, large = mx.zeros((1, 4, 8192), mx.bfloat16), mx.zeros((1, 8, 8192), mx.bfloat16)
    # 3 rows of 4: 48 KB of 64 KB, within MLX's 16 KB of slack. 3 of 8: a copy.
    assert traced(lambda x: mx.contiguous(x[:, -3:]), small)[1].dispatches == 0
    assert traced(lambda x: mx.contiguous(x[:, -3:]), large)[1].dispatches == 1


def test_gathers_read_what_is_selected():
    table, rows = mx.zeros((1000, 16)), mx.zeros((3,), mx.int32)
    found, _ = traced(lambda t, i: t[i], table, rows)
    assert [(p.name, p.bytes_read) for p in found] == [("Gather", 3 * 16 * 4 + 3 * 4)]

    experts, width = 8, 64
    packed, scales, biases = (
        mx.zeros((experts, 32, width // 8), mx.uint32),
        mx.zeros((experts, 32, 1)),
        mx.zeros((experts, 32, 1)),
    )

    def fn(x, index):
        return mx.gather_qmm(x, packed, scales, biases, rhs_indices=index, group_size=64, bits=4)

    mx.eval(packed, scales, biases)
    found, _ = traced(fn, mx.zeros((1, 1, width)), mx.zeros((2,), mx.uint32))
    product = next(p for p in found if p.name == "GatherQMM")
    # x, the 2 indices and the one that says which x; 2 experts of 32 rows with 32 + 4 + 4 bytes.
    assert product.bytes_read == 4 * width + 2 * 4 + 4 + 2 * 32 * 40


@pytest.mark.parametrize("has_residual", [False, True])
def test_an_input_left_out_is_not_read(has_residual):
    """Three tokens of two experts and the shared one, 64 wide, in float32."""
    y, weights, residual = mx.zeros((9, 64)), mx.zeros((3, 3)), mx.zeros((3, 64))
    inputs = (y, weights, residual) if has_residual else (y, weights)
    with backend.override("metal"):
        found, _ = traced(expert_combine, *inputs)
    sizes = 8 * 4
    expected = 9 * 64 * 4 + 3 * 3 * 4 + sizes + has_residual * 3 * 64 * 4
    assert [p.bytes_read for p in found] == [expected]


# --- Compiled functions -------------------------------------------------------------------------------------


def mlx_groups(fn, *inputs):
    """Names of the kernels that MLX itself fuses, read from its drawing of the graph."""
    out = fn(*inputs)
    drawing = io.StringIO()
    mx.export_to_dot(drawing, *(out if isinstance(out, (tuple, list)) else [out]))
    return Counter(re.findall(r'label ="Compiled(\w+)"', drawing.getvalue()))


def chain(x, y):
    for i in range(30):  # deeper than one kernel may be
        x = mx.tanh(x) + y * i
    return x


def wide(x, *rest):
    return sum((mx.exp(r) * r for r in rest), x)  # more inputs than one kernel may have


def shared_broadcast(x, y):
    row = mx.broadcast_to(y[0], x.shape)
    return mx.exp(x * row), (x + row).sum(axis=0) * y[0]


def around_a_reduction(x, y):
    shifted = mx.exp(x) * y
    total = shifted.sum(axis=-1, keepdims=True)
    return mx.sigmoid(shifted) / total, mx.negative(shifted), mx.square(total) + 1


def results_used_inside(x, y):
    a = mx.exp(x)
    b = a * y
    return a, b, mx.tanh(b) - a


@pytest.mark.parametrize(
    ("fn", "count"),
    [(chain, 2), (wide, 31), (shared_broadcast, 2), (around_a_reduction, 2), (results_used_inside, 2)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_fusion_is_mlx_own(fn, count):
    inputs = [mx.full((4, 8), float(i)) for i in range(count)]
    mx.eval(inputs)
    compiled = mx.compile(fn)
    expected = mlx_groups(compiled, *inputs)
    assert expected  # MLX fused something
    mine = Counter("".join(p.fused) for p in trace.primitives(compiled, *inputs) if p.fused)
    assert mine == expected


def test_compiled_functions_are_found_where_they_are_bound():
    class Holder:
        in_class = mx.compile(lambda x: mx.exp(x) * 2)

    holder = Holder()
    holder.attribute = mx.compile(lambda x: mx.tanh(x) + 1)
    table = {"entry": mx.compile(lambda x: mx.sin(x) - 3)}
    listed = [mx.compile(lambda x: mx.cos(x) / 4)]
    before = (Holder.in_class, holder.attribute, table["entry"], listed[0])

    def fn(x):
        x = table["entry"](holder.attribute(Holder.in_class(x)))
        inline = mx.compile(lambda x: mx.abs(x) + 5)  # compiled while the trace runs
        return inline(nn.silu(listed[0](x)))

    found, total = traced(fn, mx.zeros((8,)))
    assert [p.name for p in found] == ["Compiled"] * 6
    assert total.stages == 6
    assert (Holder.in_class, holder.attribute, table["entry"], listed[0]) == before


def test_what_is_compiled_during_a_trace_serves_later_ones():
    kept = []

    def fn(x):
        if not kept:
            kept.append(mx.compile(lambda x: mx.exp(x) * 2))
        return kept[0](x)

    for _ in range(2):
        found, _total = traced(fn, mx.zeros((8,)))
        assert [p.name for p in found] == ["Compiled"]
    assert fn(mx.zeros((2,))).tolist() == [2, 2]


def test_a_compiled_function_inside_another_fuses_with_it():
    inner = mx.compile(lambda x: mx.exp(x) * 2)
    outer = mx.compile(lambda x: inner(x + 1) - 3)
    found, _ = traced(outer, mx.zeros((8,)))
    assert [p.name for p in found] == ["Compiled"]
    assert Counter(found[0].fused) == {"Add": 1, "Exp": 1, "Multiply": 1, "Subtract": 1, "Broadcast": 3}


def test_a_compiled_function_of_constants_only_is_traced_too():
    scale = mx.ones((8,))
    mx.eval(scale)
    compiled = mx.compile(lambda s: mx.exp(s) * s)
    found, _ = traced(lambda x: x @ compiled(scale), mx.zeros((8,)))
    assert Counter(p.name for p in found) == {"Compiled": 1, "Matmul": 1}


# --- Custom kernels and the Metal branch --------------------------------------------------------------------


def test_a_custom_kernel_arrives_with_source_and_launch():
    kernel = mx.fast.metal_kernel(
        name="twice",
        input_names=["x"],
        output_names=["y"],
        source="uint i = thread_position_in_grid.x; y[i] = x[i] * T(2);",
    )

    def fn(x):
        return kernel(
            inputs=[x.T],
            template=[("T", mx.float32)],
            grid=(32, 2, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(8, 8)],
            output_dtypes=[mx.float32],
        )[0]

    (found,), total = traced(fn, mx.zeros((8, 8)))
    assert found.name.startswith("twice_")
    assert (found.grid, found.threadgroup) == ((32, 2, 1), (32, 1, 1))
    assert "const device float* x [[buffer(0)]]" in found.source
    assert "y[i] = x[i] * T(2);" in found.source
    # x.T is not row-contiguous, and MLX makes it so first: read and written once more.
    assert (found.dispatches, total.stages) == (2, 2)
    assert (total.bytes_read, total.bytes_written) == (2 * 256, 2 * 256)


def test_the_metal_branch_is_taken_and_everything_is_put_back():
    before = (mx.metal.is_available, mx.default_device, mx.fast.rms_norm, gated_delta.compute_g)
    stream = mx.default_stream(mx.default_device())
    kernel = gated_delta._gated_delta_kernel_packed
    with trace.as_on_metal():
        assert mx.metal.is_available()
        assert mx.default_device() == mx.gpu
        assert mx.default_stream(mx.default_device()) == stream
        assert gated_delta._gated_delta_kernel_packed is not None
    trace.primitives(nn.RMSNorm(8), mx.zeros((2, 8)))
    assert (mx.metal.is_available, mx.default_device, mx.fast.rms_norm, gated_delta.compute_g) == before
    assert gated_delta._gated_delta_kernel_packed is kernel


def test_lily_still_sees_the_machine_as_it_is():
    """Otherwise a trace would try Lily's kernels on a GPU that is not there, and remember the failure."""
    before = {name: (backend.available(name), backend.chip(name)) for name in ("metal", "cuda", "host")}
    with trace.as_on_metal():
        assert {name: (backend.available(name), backend.chip(name)) for name in before} == before


def test_a_trace_leaves_the_answer_about_neural_accelerators():
    """It is kept for the process, and benchmarks record it."""
    before = backend.neural_accelerators.__wrapped__()
    with trace.as_on_metal():
        assert backend.neural_accelerators.__wrapped__() == before


def test_what_mlx_cannot_export_is_an_error():
    with pytest.raises(trace.TraceError, match="SegmentedMM"):
        trace.primitives(lambda x: mx.segmented_mm(x, x, mx.array([[0, 2]])), mx.zeros((4, 4)))


# --- Stock layers of the full shape -------------------------------------------------------------------------

QWEN = {
    "model_type": "qwen3_5_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 248320,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "shared_expert_intermediate_size": 512,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "full_attention_interval": 4,
    "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


@pytest.fixture(scope="module")
def model():
    """Stock's model of Qwen3.6-35B-A3B's shape, quantised, of constants: no weight takes memory."""
    model = qwen3_5_moe.Model(qwen3_5.ModelArgs.from_dict({"model_type": "qwen3_5_moe", "text_config": QWEN}))
    model.set_dtype(mx.bfloat16, lambda dtype: mx.issubdtype(dtype, mx.floating))
    wanted = model.quant_predicate
    nn.quantize(model, 64, 4, class_predicate=lambda p, m: hasattr(m, "to_quantized") and wanted(p, m))
    model.update(tree_map(lambda a: constant(a.shape, a.dtype), model.parameters()))
    for layer in model.layers:
        if layer.is_linear:
            layer.linear_attn.A_log = constant((32,), mx.float32)
    return model.eval()


def filled_cache(model, offset):
    cache = model.make_cache()
    for layer, entry in zip(model.layers, cache, strict=True):
        if layer.is_linear:
            entry[0] = constant((1, 3, 8192), mx.bfloat16)
            entry[1] = constant((1, 32, 128, 128), mx.float32)
        else:
            entry.keys = constant((1, 2, 512, 256), mx.bfloat16)
            entry.values = constant((1, 2, 512, 256), mx.bfloat16)
            entry.offset = offset
    return cache


def contents(cache):
    return [[entry.keys, entry.values] if hasattr(entry, "keys") else [entry[0], entry[1]] for entry in cache]


# Launches of one layer's mixture of experts and its norm, decoding one token, from mlx_lm's source.
MOE = Counter(
    RMSNorm=1,
    QuantizedMatmul=5,  # router; shared expert's gate, up, down; its scalar gate
    Softmax=1,
    ArgPartition=1,
    GatherAxis=1,  # the chosen weights
    Reduce=2,  # their sum; the sum over experts
    Divide=1,
    Arange=3,  # gather_qmm numbers the rows of x for each of the three products
    GatherQMM=3 + 2,  # x with two new axes has strides that gate and up copy first
    Compiled=2,  # SwiGLU of the experts and of the shared expert
    Multiply=2,  # weights; the shared expert's gate
    Sigmoid=1,
    Add=2,  # shared expert; residual
)
DELTA_NET = Counter(
    RMSNorm=1 + 2 + 1,  # input; q and k; gated output norm
    QuantizedMatmul=5,  # qkv, z, b, a; out
    Concatenate=2,  # convolution state and new row
    Convolution=1,
    Compiled=3,  # SiLU, the decay gate, the gated norm's product
    Multiply=2,  # scales of q and k
    Sigmoid=1,  # beta
    gated_delta_step=1,
    Add=1,
)
ATTENTION = Counter(
    RMSNorm=1 + 3,  # input; q (a slice of every head's query and gate, so a copy first) and k
    QuantizedMatmul=4,
    RoPE=2,  # in place: the norm's result has no other reader
    SliceUpdate=2,
    ScaledDotProductAttention=1,
    Reshape=1,  # the output gate is a slice of every head too
    Sigmoid=1,
    Multiply=1,
    Add=1,
)


def launches(found):
    return Counter({name: n for name, n in total_by_family(found).items() if n})


def total_by_family(found):
    counts = Counter()
    for p in found:
        counts["gated_delta_step" if p.name.startswith("gated_delta_step") else p.name] += p.dispatches
    return counts


@pytest.mark.parametrize(
    ("index", "mixer", "stages"),
    # rms, qkv, concat, conv, silu, norm, scale, scan, norm, product, out, add; the MoE: eleven and one copy
    [(0, DELTA_NET, 12 + 12), (3, ATTENTION, 9 + 12)],
    ids=["gated DeltaNet", "full attention"],
)
def test_a_stock_layer_counted_by_hand(model, index, mixer, stages):
    cache = filled_cache(model, offset=300)[index]
    mask = None

    def fn(x):
        return model.layers[index](x, mask, cache), contents([cache])

    found, total = traced(fn, mx.zeros((1, 1, 2048), mx.bfloat16))
    assert launches(found) == mixer + MOE
    assert total.stages == stages
    if index == 0:
        (scan,) = [p for p in found if p.name.startswith("gated_delta_step")]
        assert scan.grid == (32, 16, 32)
        assert "state_out" in scan.source


def test_the_stock_decode_step_of_the_whole_model(model):
    cache = filled_cache(model, offset=300)

    def step(token):
        return model(token, cache=cache), contents(cache)

    found, total = traced(step, mx.zeros((1, 1), mx.int32))
    # Embedding: three gathers and a dequantisation; final norm and output head.
    outside = Counter(Gather=3, Dequantize=1, RMSNorm=1, QuantizedMatmul=1)
    layers = Counter()
    for layer in model.layers:
        layers += MOE + (DELTA_NET if layer.is_linear else ATTENTION)
    assert launches(found) == layers + outside
    # A chain of kernels through every layer, one gather and the dequantisation before, norm and head after.
    assert total.stages == 30 * 24 + 10 * 21 + 4
    # 1.64 GB of weights, 22 MB of gates (0.5625 and 1.0625 bytes a weight) and 63 MB of state, within the
    # activations' few MB.
    assert total.bytes_read == pytest.approx(1.64e9 + 22e6 + 63e6, rel=0.02)
