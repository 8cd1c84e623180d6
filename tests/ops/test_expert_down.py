"""The experts' down projections against their fp32 reference, and the whole block against stock's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close
from mlx import nn
from mlx_lm.models.qwen3_next import ModelArgs, Qwen3NextSparseMoeBlock
from packed_problems import ACCUMULATED, matrix, unpacked, vector

from lily_mlx.launch import backend as backends
from lily_mlx.launch import host, source
from lily_mlx.launch.kernel import host_options
from lily_mlx.ops import expert_down as op
from lily_mlx.ops.expert_gate_up import expert_gate_up
from lily_mlx.ops.packed import Packed
from lily_mlx.ops.qmv import qmv

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]

TILES = [{"rows": 16, "ahead": 1}, {"rows": 8, "ahead": 2}, {"rows": 32, "ahead": 4}]

SMALL = {"N": 64, "M": 96, "MS": 160, "E": 11, "top_k": 7, "group": 32}


def problem(N, M, MS, E, top_k, bits=4, shared_bits=None, group=64, dtype=mx.float32, seed=0):
    rng = np.random.default_rng(seed)
    experts = [*rng.permutation(E)[:top_k].tolist(), E]
    return {
        "h": vector(rng, top_k * M + MS),
        "experts": mx.array(experts, dtype=mx.int32),
        "weights": mx.array(rng.uniform(0.1, 1, top_k + 1).astype(np.float32)),
        "residual": vector(rng, 1, 1, N, dtype=dtype),
        "down": matrix(rng, E, N, M, bits=bits, group=group, dtype=dtype),
        "shared_down": matrix(rng, N, MS, bits=shared_bits or bits, group=group, dtype=dtype),
    }


def check(arguments, **options) -> mx.array:
    assert op.supports(**arguments, backend=options["backend"]) is None
    y = op.expert_down(**arguments, **options)
    assert y.dtype == arguments["residual"].dtype
    # As many sums as there are experts, each with an error of its own.
    assert_close("y", y, op.expert_down_reference(**arguments), ACCUMULATED)
    return y


@pytest.fixture(autouse=True)
def checked_host():
    """On the host every launch runs twice: outputs poisoned in two ways, buffers at both alignments."""
    with host_options(check=True):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
@pytest.mark.parametrize("width", [512, 1536])
def test_every_layout(backend, tile, width):
    """One chunk of an expert's width, and three."""
    check(problem(64, width, width, 3, 2), tile=tile, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"N": 64, "M": 512, "MS": 512, "E": 32, "top_k": 8}, "Qwen3.6-35B-A3B, fewer rows and experts"),
        ({"N": 256, "M": 64, "MS": 64, "E": 32, "top_k": 8}, "the tiny checkpoint"),
        (SMALL, "one lane a row; another width for the shared expert"),
        ({"N": 32, "M": 768, "MS": 256, "E": 4, "top_k": 3}, "three chunks, and one"),
        ({"N": 96, "M": 128, "MS": 128, "E": 9, "top_k": 8, "group": 128, "bits": 8}, "8 bits"),
        ({"N": 64, "M": 512, "MS": 512, "E": 3, "top_k": 2, "shared_bits": 8}, "different bits"),
        ({"N": 32, "M": 32, "MS": 64, "E": 2, "top_k": 1, "group": 32}, "one expert"),
        ({"N": 32, "M": 1024, "MS": 1024, "E": 11, "top_k": 10}, "ten experts"),
    ],
)
def test_shapes_with_the_tile_of_the_table(backend, shape, why):
    check(problem(**shape), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_dtypes(backend, dtype):
    check(problem(**SMALL, dtype=dtype), tile=TILES[1], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expert_chosen_twice_counts_twice(backend):
    arguments = problem(**SMALL)
    arguments["experts"][3] = arguments["experts"][0]
    check(arguments, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slot", range(8))
def test_a_weight_of_zero_leaves_the_expert_out(backend, slot):
    """Each simdgroup's part is its expert's: what the others hold does not matter to it."""
    arguments = problem(**SMALL)
    arguments["weights"] = (mx.arange(8) == slot).astype(mx.float32)
    check(arguments, backend=backend)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_no_schedule_changes_a_bit(tile):
    arguments = problem(64, 1024, 64, 3, 2)
    host.check_schedules(lambda: op.expert_down(**arguments, tile=tile, backend="host"))


def test_the_text_for_apple_silicon_runs_on_the_host(monkeypatch):
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, _: assemble(kernel, "metal"))
    check(problem(**SMALL, dtype=mx.bfloat16), backend="host")


def test_on_metal_it_is_one_dispatch():
    """Traced on any machine: nothing is copied, padded or converted around the kernel."""
    arguments = problem(64, 64, 64, 9, 8, dtype=mx.bfloat16)
    names: list[str] = []

    def record(node):
        if node["type"] == "primitive":
            names.append(node["name"])

    def layer(h, experts, weights, residual, *parts):
        with backends.override("metal"):
            return op.expert_down(
                h, experts, weights, residual, Packed(*parts[:3], 4, 64), Packed(*parts[3:], 4, 64)
            )

    vectors = [arguments[name] for name in ("h", "experts", "weights", "residual")]
    mx.export_function(record, layer, *vectors, *arguments["down"][:3], *arguments["shared_down"][:3])
    assert names == ["CustomKernel"]


def test_reference_is_the_formula():
    """In float64, with the numbers taken apart by hand."""
    arguments = problem(**SMALL)
    h, weights = (np.array(arguments[name], dtype=np.float64) for name in ("h", "weights"))
    down, shared = unpacked(arguments["down"]), unpacked(arguments["shared_down"])
    want = np.array(arguments["residual"][0, 0], dtype=np.float64)
    for slot, expert in enumerate(arguments["experts"].tolist()[:-1]):
        want += weights[slot] * (down[expert] @ h[slot * 96 : (slot + 1) * 96])
    want += weights[-1] * (shared @ h[7 * 96 :])
    np.testing.assert_allclose(
        np.array(op.expert_down_reference(**arguments))[0, 0], want, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_whole_block_is_stocks(backend):
    """Router, routing, both halves, shared expert and residual against mlx-lm's block in float32."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 32}
    args = ModelArgs.from_dict(
        {
            **dict.fromkeys(ModelArgs.__dataclass_fields__, 1),
            **sizes,
            "num_experts": 11,
            "num_experts_per_tok": 7,
            "norm_topk_prob": True,
        }
    )
    mx.random.seed(0)
    block = Qwen3NextSparseMoeBlock(args)
    eight = {"group_size": 32, "bits": 8}
    nn.quantize(
        block,
        group_size=32,
        bits=4,
        class_predicate=lambda path, m: (
            hasattr(m, "to_quantized") and (eight if path.endswith("gate") else True)
        ),
    )
    x = mx.random.normal((1, 1, 64))
    norm_weight = mx.random.uniform(0.5, 1.5, (64,))
    want = x + block(mx.fast.rms_norm(x, norm_weight, 1e-6))

    logits = qmv(
        x,
        [Packed.of(block.gate), Packed.of(block.shared_expert_gate)],
        norm_weight=norm_weight,
        backend=backend,
    )
    experts, shared = block.switch_mlp, block.shared_expert
    first = [experts.gate_proj, experts.up_proj, shared.gate_proj, shared.up_proj]
    middle = expert_gate_up(x, norm_weight, logits, *map(Packed.of, first), 7, backend=backend)
    y = op.expert_down(*middle, x, Packed.of(experts.down_proj), Packed.of(shared.down_proj), backend=backend)
    assert_close("y", y, want, 4 * ACCUMULATED)  # three products one after another, and stock's own error


def test_self_check_passes():
    assert op._self_check("host") is None


GOOD = problem(32, 64, 64, 5, 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"residual": mx.zeros((2, 32))}, "more than one vector"),
        ({"residual": mx.zeros((32,), mx.int32)}, "residual is"),
        ({"residual": mx.zeros((64,))}, "down has 32 rows, not 64"),
        ({"h": mx.zeros((255,))}, "do not belong together"),
        ({"h": mx.zeros((256,), mx.float16)}, "h is"),
        ({"experts": mx.zeros((4,), mx.uint32)}, "experts are"),
        ({"weights": mx.zeros((3,))}, "do not belong together"),
        ({"down": GOOD["shared_down"]}, "down has shape"),
        ({"shared_down": GOOD["shared_down"]._replace(bits=3)}, "shared down has 3 bits"),
        ({"shared_down": GOOD["shared_down"]._replace(biases=None)}, "not affine"),
        (problem(48, 64, 64, 5, 3), "N=48 is not a multiple of 32"),
        (problem(32, 32, 32, 13, 12, group=32), "12 chosen experts do not fit"),
    ],
)
def test_supports_gives_the_reason(change, reason):
    answer = op.supports(**{**GOOD, **change}, backend="cuda")
    assert answer is None if reason is None else reason in answer


def test_supports_without_a_gpu(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert op.supports(**GOOD) == "no GPU back-end"
