"""The mixture of experts against mlx-lm's block: one token, whichever ops run as kernels, and many."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.qwen3_next import ModelArgs, Qwen3NextSparseMoeBlock

from lily_mlx.counters import counts
from lily_mlx.launch import backend, source
from lily_mlx.layers.feed_forward import SparseMoeBlock
from lily_mlx.ops import choice

OPS = ("expert_gate_up", "expert_down")


@pytest.fixture(autouse=True, params=[name for name in source.BACKENDS if backend.available(name)])
def kernels(request, monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", request.param)


def block(
    *, width: int = 96, shared_width: int = 96, shared_bits: int = 4, norm_topk_prob: bool = True
) -> SparseMoeBlock:
    """Eleven quantised experts of which seven are chosen; hidden size 64."""
    sizes = {
        "hidden_size": 64,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared_width,
        "num_experts": 11,
        "num_experts_per_tok": 7,
        "norm_topk_prob": norm_topk_prob,
    }
    mx.random.seed(0)
    made = SparseMoeBlock(ModelArgs.from_dict({**dict.fromkeys(ModelArgs.__dataclass_fields__, 1), **sizes}))

    def predicate(path: str, module: nn.Module) -> bool | dict[str, int]:
        if not hasattr(module, "to_quantized"):
            return False
        bits = 8 if path.endswith("gate") else shared_bits if path.startswith("shared_expert.") else 4
        return {"group_size": 32, "bits": bits}

    nn.quantize(made, class_predicate=predicate)
    return made


def launched() -> set[str]:
    return {name for name in counts if name.startswith("op.") and counts[name]}


def check(made: SparseMoeBlock, ran: set[str]) -> None:
    """Compare with stock's block in float32; ``ran``: the ops whose kernels must have run, and no other."""
    norm = nn.RMSNorm(64)
    norm.weight = mx.random.uniform(0.5, 1.5, (64,))
    x = mx.random.normal((1, 1, 64))
    want = x + made(norm(x))
    counts.clear()
    y = made.decode(x, norm)
    assert {op for op in OPS if counts[f"op.{op}"]} == ran
    assert y.shape == want.shape
    assert y.dtype == want.dtype
    # float32: three products, each with START / 2^24 of common/packed_rows.h, and stock's own error
    assert mx.abs(y - want).max().item() <= 4 * 2**-16 * mx.abs(want).max().item()


@pytest.mark.parametrize("off", [(), OPS[:1], OPS[1:], OPS], ids="-".join)
def test_it_is_stocks_block(monkeypatch, off):
    monkeypatch.setenv("LILY_DISABLE", ",".join(off))
    check(block(), set(OPS) - set(off))


@pytest.mark.parametrize("change", [{"shared_width": 32}, {"shared_bits": 8}], ids=str)
def test_a_shared_expert_of_another_kind(change):
    """Its matrices cannot stand behind the experts'. Nothing is launched that stock's block does again."""
    check(block(**change), set())
    assert not launched()


def test_weights_that_are_not_renormalised():
    check(block(norm_topk_prob=False), {"expert_down"})
    made = block(norm_topk_prob=False)
    made.shared_expert.down_proj.bias = mx.random.normal((64,))
    check(made, set())


def test_an_expert_layer_that_is_more_than_a_matrix():
    """A bias on one half: the other half still runs as a kernel."""
    made = block()
    made.shared_expert.down_proj.bias = mx.random.normal((64,))
    check(made, {"expert_gate_up"})
    made = block()
    made.switch_mlp.up_proj.bias = mx.random.normal((11, 96))
    check(made, {"expert_down"})


def loaded(load: str) -> SparseMoeBlock:
    """A block whose router takes the same seven experts for every token, one for every token, or any."""
    made = block(width=128, shared_width=128)
    if favoured := {"single": 7, "skewed": 1}.get(load):
        gate = nn.Linear(64, 11, bias=False)
        gate.weight = mx.random.normal((11, 64)) * 0.1
        gate.weight[:favoured, 0] = 10.0
        made.gate = nn.QuantizedLinear.from_linear(gate, 32, 8)
    made.eval()
    return made


def prompt_of(B: int, T: int) -> mx.array:
    x = mx.random.normal((B, T, 64), key=mx.random.key(T))
    x[..., 0] = 1.0
    return x


@pytest.mark.parametrize("T", [2, 63, 64, 65, 257])
@pytest.mark.parametrize("load", ["uniform", "skewed", "single"])
def test_many_tokens_are_stocks_block(T, load):
    """Each expert may have some, one expert everything, four nothing."""
    made, x = loaded(load), prompt_of(1, T)
    chosen = mx.argpartition(made.gate(x), kth=-7, axis=-1)[..., -7:]
    rows = sorted(((chosen == expert).sum().item() for expert in range(11)), reverse=True)
    most = {"uniform": 1, "skewed": 1, "single": 7}[load]
    assert load == "uniform" or rows[:most] == [T] * most
    want = Qwen3NextSparseMoeBlock.__call__(made, x)
    counts.clear()
    y = made(x)
    assert all(counts[f"op.expert_{op}"] == 1 for op in ("gemm_gate_up", "gemm_down", "combine"))
    assert mx.abs(y - want).max().item() <= 4 * 2**-16 * mx.abs(want).max().item()


def test_many_tokens_whose_routing_is_not_trusted(monkeypatch, same):
    """Stock's block runs as a whole; routing on the CPU is what LILY_DISABLE asks for, and no other."""
    made, x = loaded("uniform"), prompt_of(1, 9)
    monkeypatch.setattr(choice, "distrust", lambda op, backend: "wrong" if op == "expert_route" else None)
    counts.clear()
    same(made(x), Qwen3NextSparseMoeBlock.__call__(made, x))
    assert not launched()
    monkeypatch.setenv("LILY_DISABLE", "expert_route")
    made(x)
    assert "op.expert_gemm_down" in launched()
    assert "op.expert_route" not in launched()


def test_many_tokens_of_a_width_that_only_one_product_takes(same):
    """Half a step of the sum: the down product cannot, so nothing is launched and then done again."""
    made, x = block(width=96, shared_width=96), prompt_of(1, 5)
    made.eval()
    counts.clear()
    same(made(x), Qwen3NextSparseMoeBlock.__call__(made, x))
    assert not launched()


def test_a_row_of_a_batch_has_the_same_bits_whatever_is_beside_it():
    """Rows share experts, blocks and threadgroups, but no sum."""
    made, x = loaded("skewed"), prompt_of(2, 33)
    counts.clear()
    beside = mx.concatenate([x[:1], mx.full((1, 33, 64), mx.nan)])
    assert mx.array_equal(made(beside)[0], made(x)[0])
    assert counts["op.expert_combine"] == 2
    assert mx.array_equal(made(x)[1], made(mx.stack([x[1], x[0]]))[0])
