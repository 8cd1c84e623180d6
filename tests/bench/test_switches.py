"""The arms with something switched off: what is off inside, nothing outside, and the same results."""

import copy
import inspect
import io
import os

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from bench import ab, arms, gate, graph, random_weights, switches
from bench.ablations import ABLATIONS
from lily_mlx import prompt, step, tiles
from lily_mlx.counters import counts
from lily_mlx.launch import trace
from lily_mlx.layers import attention, feed_forward, gated_delta_net, projection
from lily_mlx.models import LilyModel
from lily_mlx.ops.tile_product import grouped_tile
from lily_mlx.settings import settings
from tests.conftest import TINY
from tests.plugin.test_cases import small_moe

NAMES = switches.names()


def switched(name):
    return arms.WITHOUT + name


@pytest.fixture(scope="module")
def model():
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "head_dim": 64}
    config = small_moe(**sizes, num_hidden_layers=4) | {"quantization": {"group_size": 64, "bits": 4}}
    return random_weights.build(config)


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "host")


def patched_functions():
    return (
        tiles._fitting,
        switches._generate.generate_step,
        LilyModel.__call__,
        prompt.PromptStep.why_not,
        step.DecodeStep.why_not,
        attention._write,
    )


@pytest.mark.parametrize("name", NAMES)
def test_an_arm_is_entered_and_left_cleanly(name, model):
    before, environment = patched_functions(), dict(os.environ)
    (arm,) = arms.make([switched(name)], model)
    with arm.active():
        assert settings().disabled_ops == set(switches.disabled(name))
        changed = [a is not b for a, b in zip(before, patched_functions(), strict=True)]
        assert sum(changed) == (name in switches._MECHANISMS)
    assert patched_functions() == before
    assert dict(os.environ) == environment


def test_every_op_is_one_that_layers_ask_about():
    asked = "".join(inspect.getsource(m) for m in (attention, feed_forward, gated_delta_net, projection))
    for name in NAMES:
        for op in switches.disabled(name):
            assert (name in switches._MECHANISMS) or f'why_not("{op}"' in asked, op


def test_every_mechanism_has_a_switch_or_a_reason():
    for a in ABLATIONS:
        assert (a.switch in NAMES) if a.switch else a.why_no_switch
    mechanisms = {number for a in ABLATIONS for number in a.mechanism.split(", ")}
    assert {*(f"P{i}" for i in range(1, 7)), *(f"D{i}" for i in range(1, 8))} <= mechanisms


def test_no_arm_finds_what_another_compiled(model):
    made = arms.make(["lily", *map(switched, NAMES)], model)
    keys = set()
    for arm in made:
        with arm.active():
            keys.add(settings())
    assert len(keys) == len({id(step.decode_step(arm.model)) for arm in made}) == len(made)


@pytest.mark.parametrize("chip", ["cuda", "metal"])
def test_experts_have_the_smallest_loads_tile_whatever_the_load(chip, model):
    (arm,) = arms.make([switched("expert_tiles")], model)
    small, large = (grouped_tile(tokens, 8, 256, chip) for tokens in (1, 8192))
    assert small["rows"] < large["rows"]
    with arm.active():
        assert grouped_tile(8192, 8, 256, chip) == small
        assert tiles.choose("qmm", chip, T=2048, N=2048, K=2048)["rows"] > small["rows"]
    assert grouped_tile(8192, 8, 256, chip) == large


def test_one_layout_of_attention(model):
    (arm,) = arms.make([switched("attention_layout")], model)
    sizes = {"Hk": 2, "group": 8, "D": 256}
    general, fixed = (tiles.choose("attention_decode", "metal", capacity=n, **sizes) for n in (8192, 1 << 17))
    assert general["block_rows"] == 0 < fixed["block_rows"]
    with arm.active():
        assert tiles.choose("attention_decode", "metal", capacity=1 << 17, **sizes) == general


def calls_of(arm, monkeypatch, measure):
    """The tokens of each call of the arm's model, as it is given them."""
    calls, run = [], LilyModel._run

    def noted(self, inputs, cache, input_embeddings):
        calls.append(inputs)
        return run(self, inputs, cache, input_embeddings)

    monkeypatch.setattr(LilyModel, "_run", noted)
    with arm.active():
        measure(arm.model)
    return calls


def test_a_prompt_without_chunks(model, monkeypatch):
    whole, chunked = arms.make([switched("prompt_chunks"), "lily"], model)
    measure = ab._Prefill(ab.random_prompt(128, 0)(10), 4).time
    assert [x.size for x in calls_of(chunked, monkeypatch, measure)] == [4, 4, 1, 1]
    monkeypatch.undo()
    assert [x.size for x in calls_of(whole, monkeypatch, measure)] == [9, 1]


@pytest.mark.parametrize("name", ["lily", switched("token_on_gpu")])
def test_the_token_is_read_before_the_next_step(name, model, monkeypatch):
    (arm,) = arms.make([name], model)
    token = mx.array([[3]])
    read = calls_of(arm, monkeypatch, lambda m: m(token, cache=make_prompt_cache(m)))
    assert read[0].tolist() == [[3]]
    assert (read[0] is token) == (name == "lily")


@pytest.mark.parametrize("name", ["decode_step", "prompt_step"])
def test_a_step_is_not_compiled(name, model, host):
    (arm,) = arms.make([switched(name)], model)
    cache = make_prompt_cache(arm.model)
    arm.model(mx.array([[1, 2]]), cache=cache)
    taken = {"decode_step": step.decode_step, "prompt_step": prompt.prompt_step}[name](arm.model)
    with arm.active():
        assert taken.why_not(mx.array([[1]]), cache) == "switched off"
    assert taken.why_not(mx.array([[1]]), cache) != "switched off"


def test_without_overlap_an_attention_layer_has_two_stages_more():
    """Values wait for a launch that waits for keys."""
    found = {}
    for arm in arms.make(["lily", switched("overlap")], graph._from_checkpoint(str(TINY))):
        with arm.active():
            found[arm.name] = trace.summary(graph.trace_pass(arm.model, "decode", 1, 300))
        layers = sum(not layer.is_linear for layer in arm.model.layers)
    lily, without = found.values()
    assert without.dispatches - lily.dispatches == layers
    assert without.stages - lily.stages == without.chain - lily.chain == 2 * layers


def test_logits_without_overlap_are_the_same_bits(stock, host, same):
    model, _ = stock
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3, 4, 5]]), cache=cache))
    logits = []
    for arm in arms.make(["lily", switched("overlap")], model):
        own = copy.deepcopy(cache)
        with arm.active():
            steps = [arm.model(mx.array([[token]]), cache=own) for token in (6, 7, 8)]
            logits.append(mx.concatenate(steps))
            mx.eval(logits[-1])
    same(*logits)


def test_a_false_dependency_outlives_compiling_and_changes_no_value(same):
    keys, values, last_keys, last_values = (mx.random.normal((1, 2, n, 4)) for n in (8, 8, 2, 2))
    last_keys[0, 0, 0], last_values[0, 1, 1] = mx.nan, mx.nan
    operands = (keys, values, last_keys, last_values, mx.array([0, 1]))
    mx.eval(operands)

    def written() -> tuple[list[mx.array], int]:
        """Keys and values, and the writes that go into the values."""
        results = mx.compile(attention._write)(*operands)
        dot = io.StringIO()
        mx.export_to_dot(dot, results[1])
        return results, dot.getvalue().count('"ScatterAxis"')

    plain, writes = written()
    assert writes == 1
    with switches.off("overlap"):
        in_turn, writes = written()
    assert writes == 2
    for a, b in zip(plain, in_turn, strict=True):
        same(a, b)


KERNELS_OFF = {
    "expert_gemm": ("expert_gemm_gate_up", "expert_gemm_down"),
    "expert_route": ("expert_route", "expert_choose"),
    "gated_delta_scan": ("gated_delta_scan",),
    "qmv": ("qmv",),
    "attention_decode": ("attention_decode",),
    "decode_step": ("gated_delta_step", "expert_gate_up", "attention_decode"),
    "expert_tiles": (),
    "attention_layout": (),
    "token_on_gpu": (),
    "prompt_chunks": (),
}
"""Kernels that the prompt and the tokens of the gate no longer run."""


def test_arms_in_kernels_agree_with_stock_on_one_set_of_weights(model, host, monkeypatch):
    monkeypatch.setattr(gate, "TOKENS", 6)
    monkeypatch.setattr(gate, "CHUNK", 4)
    names = ["stock", "lily", *map(switched, KERNELS_OFF)]
    made = arms.make(names, model)
    tokens = ab.random_prompt(128, 0)(6)
    mx.clear_cache()
    weights = mx.get_active_memory()
    ran = {}
    for arm in made:
        counts.clear()
        gate.check(model, [arm], tokens, trained=False)
        ran[arm.name] = {name.removeprefix("op.") for name in counts if name.startswith("op.")}
    assert not ran["stock"]
    for name, kernels in KERNELS_OFF.items():
        assert not kernels or set(kernels) & ran["lily"], name
        assert not set(kernels) & ran[switched(name)], name
    # Lily joined matrices, once for all arms.
    mx.clear_cache()
    assert mx.get_active_memory() < 1.5 * weights
