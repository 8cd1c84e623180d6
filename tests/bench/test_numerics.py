"""bench/numerics.py and bench/oracle.py: distributions by hand, small models, the tiny checkpoint."""

import argparse
import json
import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gated_delta, qwen3_5_moe
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

import lily_mlx
from bench import numerics, oracle
from lily_mlx.errors import LilyError, UsageError
from tests.conftest import DATA, TINY
from tests.plugin.test_cases import small_moe


def arguments(*words):
    parser = argparse.ArgumentParser()
    numerics.add_parser(parser.add_subparsers())
    return parser.parse_args(["numerics", "--model", str(TINY), *map(str, words)])


def run(tmp_path, *words):
    """What ``lily-mlx bench numerics`` writes to its JSON file."""
    file = tmp_path / "numerics.json"
    args = arguments(*words, "--json", file)
    assert args.run(args) == 0
    return json.loads(file.read_text())


def distance(found, truth, candidate):
    (entry,) = [d for d in found["distances"] if (d["truth"], d["candidate"]) == (truth, candidate)]
    return entry


# --- Arithmetic ---------------------------------------------------------------------------------------------


def test_compare_by_hand():
    # Position 0: P = (1/2, 1/2), Q = (1/4, 3/4). Position 1: equal but for a constant, which changes nothing.
    a = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], np.float32))
    b = np.log(np.array([[0.25, 0.75], [0.9, 0.1]], np.float32)) + np.float32([[0], [7]])
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    found = numerics.compare(a, b)
    assert found["mean_kl"] == pytest.approx(kl / 2, rel=1e-6)
    assert found["worst_kl"] == pytest.approx(kl, rel=1e-6)
    assert found["worst_position"] == [0]
    assert found["top1_agreement"] == 0.5  # argmax takes the first of equals
    assert found["positions"] == 2


def test_compare_keeps_what_float32_would_lose():
    """A divergence of 1e-10 between peaked distributions, where float32 log-softmax has errors of 1e-7."""
    rng = np.random.default_rng(0)
    a = (rng.normal(size=(4, 1000)) * 8).astype(np.float32)
    b = a + (rng.normal(size=a.shape) * 2e-5).astype(np.float32)
    p, q = (x.astype(np.longdouble) for x in (a, b))
    p, q = (
        x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
        for x in (p, q)
    )
    expected = (np.exp(p) * (p - q)).sum(-1)
    assert expected.max() < 1e-9
    assert numerics.compare(a, b)["mean_kl"] == pytest.approx(float(expected.mean()), rel=1e-4)
    assert numerics.compare(a, a)["worst_kl"] == 0


def test_blocks_do_not_change_the_result(monkeypatch):
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(2, 3, 5, 40)).astype(np.float32)
    whole = numerics.compare(a, b)
    monkeypatch.setattr(numerics, "BLOCK_ELEMENTS", 80)  # two rows at a time, of 15
    assert numerics.compare(a, b) == whole
    sequence, position = whole["worst_position"]
    assert numerics.compare(a[sequence, position], b[sequence, position])["mean_kl"] == whole["worst_kl"]


def test_different_vocabularies_are_an_error():
    with pytest.raises(UsageError, match=r"\(2, 5\) and \(2, 6\)"):
        numerics.compare(np.zeros((2, 5)), np.zeros((2, 6)))


class Fake:
    """An engine with given logits; it notes the passes that it was asked for."""

    def __init__(self, logits):
        self.logits, self.asked = iter(logits), []

    def __call__(self, tokens, lengths, advance):
        self.asked.append(list(lengths))
        advance(len(tokens))
        return next(self.logits)


def test_measure_by_hand():
    tokens = np.array([[0, 1, 1, 0], [1, 1, 0, 0]])
    uniform = np.zeros((4, 2), np.float32)
    sure = np.tile(np.log(np.float32([0.75, 0.25])), (4, 1))
    engines = {"stock": Fake([uniform, uniform]), "lily": Fake([uniform, sure])}
    done = []
    passes = {"stock": [4], "lily": [1, 1, 1, 1]}
    found = numerics.measure(engines, tokens, passes, [slice(0, 2), slice(2, 4)], done.append)
    assert engines["lily"].asked == [[1, 1, 1, 1]] * 2
    assert sum(done) == 16
    # The last position of a sequence has no next token: three predictions each.
    assert found["perplexity"]["stock"] == pytest.approx(2)
    # lily: 1/2 three times, then 1/4, 3/4, 3/4 for the tokens 1, 0, 0.
    assert found["perplexity"]["lily"] == pytest.approx((8 * 4 * (4 / 3) ** 2) ** (1 / 6))
    entry = distance(found, "stock", "lily")
    kl = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert entry["mean_kl"] == pytest.approx(kl / 2)
    assert (entry["worst_sequence"], entry["worst_position"]) == (1, 0)
    first, second = found["turns"]
    assert first["perplexity"]["lily"] == pytest.approx((4 * 4 * 4 / 3) ** (1 / 4))
    assert second["perplexity"]["lily"] == pytest.approx((2 * 4 / 3) ** (1 / 2))
    assert (
        distance(second, "stock", "lily")["worst_position"] == 2
    )  # counted in the sequence, not in the turn
    assert found["nearer"] is None


def test_the_nearer_engine_is_named():
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 16, (1, 64))
    truth = rng.normal(size=(64, 16)).astype(np.float32)
    noise = rng.normal(size=truth.shape).astype(np.float32)
    for name, other in (("stock", "lily"), ("lily", "stock")):
        engines = {name: truth + noise / 50, other: truth + noise / 5, "oracle": truth}
        fakes = {key: Fake([engines[key]]) for key in ("stock", "lily", "oracle")}
        nearer = numerics.measure(fakes, tokens, {key: [64] for key in fakes})["nearer"]
        difference = (
            numerics.compare(truth, engines["lily"])["mean_kl"]
            - numerics.compare(truth, engines["stock"])["mean_kl"]
        )
        assert nearer["mean_difference"] == pytest.approx(difference)
        assert nearer["low"] < difference < nearer["high"]
        assert numerics._verdict(nearer).lower().startswith(f"{name} is nearer")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_a_fault(value):
    broken = np.zeros((3, 2), np.float32)
    broken[1, 0] = value
    engines = {"stock": Fake([np.zeros((3, 2), np.float32)] * 2), "lily": Fake([np.zeros((3, 2)), broken])}
    with pytest.raises(LilyError, match="lily: the logits of sequence 1, position 1 are not finite"):
        numerics.measure(engines, np.zeros((2, 3), int), {key: [3] for key in engines})


# --- Teacher forcing and the oracle -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """A seeded float32 MoE model; widths that groups of 32 divide."""
    mx.random.seed(5)
    model = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(small_moe()))
    mx.eval(model.parameters())
    return model


def test_teacher_forced_reads_through_one_cache(small):
    tokens = np.random.default_rng(0).integers(0, 128, 13)
    whole = np.array(small(mx.array(tokens)[None], cache=make_prompt_cache(small))[0])
    done = []
    np.testing.assert_array_equal(numerics.teacher_forced(small, tokens, 13), whole)
    for step, passes in ((1, [1] * 13), (5, [5, 5, 3]), ([2, 1, 10], [2, 1, 10])):
        done.clear()
        logits = numerics.teacher_forced(small, tokens, step, done.append)
        assert done == passes
        np.testing.assert_allclose(logits, whole, atol=1e-5)
    batch = numerics.teacher_forced(small, np.stack([tokens, tokens[::-1]]), 5)
    np.testing.assert_allclose(batch[0], whole, atol=1e-5)
    with pytest.raises(ValueError, match="do not add up to 13"):
        numerics.teacher_forced(small, tokens, [5, 5])


@pytest.mark.parametrize("tied", [False, True])
def test_the_oracle_is_the_model_of_the_dequantised_weights(tied):
    mx.random.seed(6)
    config = qwen3_5_moe.ModelArgs.from_dict(small_moe(tie_word_embeddings=tied))
    quantised, plain = (qwen3_5_moe.Model(config) for _ in range(2))
    quantised.set_dtype(mx.bfloat16)
    nn.quantize(quantised, 32, 4, class_predicate=lambda path, module: hasattr(module, "to_quantized"))
    weights = dict(tree_flatten(quantised.parameters()))
    dequantised = {}
    for name, value in weights.items():
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in weights:
            value = mx.dequantize(
                value, *(weights[f"{stem}.{part}"].astype(mx.float32) for part in ("scales", "biases")), 32, 4
            )
        dequantised[name] = value.astype(mx.float32)
    plain.load_weights([(k, v) for k, v in dequantised.items() if not k.endswith((".scales", ".biases"))])

    tokens = mx.array(np.random.default_rng(1).integers(0, 128, (1, 40)))  # enough for sorted experts
    before = quantised(tokens)
    exact = oracle.fp32_oracle(quantised)
    logits = exact(tokens)
    assert logits.dtype == mx.float32
    assert mx.abs(logits - plain(tokens)).max() < 2e-5
    assert mx.abs(before.astype(mx.float32) - logits).max() > 1e-3  # what bfloat16 costs
    assert mx.array_equal(quantised(tokens), before)  # the model itself is as it was


def test_what_the_oracle_cannot_dequantise_is_an_error(small):
    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.scales = mx.zeros((2, 2)), mx.zeros((2, 1))

    model = oracle.twin(small)
    model.model.layers[0].mlp.gate = Strange()
    with pytest.raises(UsageError, match=r"layers\.0\.mlp\.gate is a Strange"):
        oracle.fp32_oracle(model)


def test_a_twin_shares_arrays_and_nothing_else(small):
    twin = oracle.twin(small)
    own, other = (dict(tree_flatten(m.parameters())) for m in (small, twin))
    assert own.keys() == other.keys()
    assert all(own[name] is other[name] for name in own)
    lily_mlx.convert(twin)
    assert {type(m) for m in twin.modules()} != {type(m) for m in small.modules()}
    assert type(small) is qwen3_5_moe.Model


def test_rounded_products_are_noticed(monkeypatch):
    oracle.require_fp32_products()

    class Rounded:
        """float32 operands as tensor cores take them: ten bits of fraction."""

        def __init__(self, array):
            self.array = array

        def __matmul__(self, other):
            return (mx.round(self.array * 2**10) / 2**10) @ other

    exact, equal = mx.full, mx.array_equal
    monkeypatch.setattr(oracle.mx, "full", lambda *args: Rounded(exact(*args)))
    monkeypatch.setattr(oracle.mx, "array_equal", lambda a, b: equal(a, b.array))
    with pytest.raises(UsageError, match="MLX_ENABLE_TF32=0"):
        oracle.require_fp32_products()


def test_the_bridge_replaces_the_loop_where_it_can(monkeypatch):
    calls = []
    loop = gated_delta.gated_delta_ops
    monkeypatch.setattr(
        oracle, "packed_scan", lambda backend: lambda *arrays: calls.append(backend) or arrays[2::3]
    )

    def arrays(Dk):
        q = mx.zeros((1, 2, 1, Dk))
        v, beta = mx.ones((1, 2, 2, 16)), mx.ones((1, 2, 2))
        return q, q, v, beta, beta, mx.zeros((1, 2, 16, Dk))

    with oracle.bridged_scan():
        bridged = gated_delta.gated_delta_ops
        bridged(*arrays(128))
        assert calls == []  # no GPU here
        monkeypatch.setattr(oracle.mx, "default_device", lambda: mx.gpu)
        assert bridged(*arrays(128))[0].shape == (1, 2, 2, 16)
        assert calls == ["cuda"]
        bridged(*arrays(64))
        bridged(*arrays(128), mx.ones((1, 2), mx.bool_))
        assert calls == ["cuda"]
    assert gated_delta.gated_delta_ops is loop


def test_mended_products_are_stocks_and_only_those_of_64_inputs(monkeypatch):
    narrow, wide = (nn.QuantizedLinear(width, 8, bias=True, group_size=64) for width in (64, 128))
    inputs = [mx.random.normal((5, width)) for width in (64, 128)]
    expected = [layer(x) for layer, x in zip((narrow, wide), inputs, strict=True)]
    calls = []
    product = mx.quantized_matmul
    monkeypatch.setattr(
        mx, "quantized_matmul", lambda x, *a, **k: calls.append(x.shape) or product(x, *a, **k)
    )
    with oracle.mended_products():
        found = [layer(x) for layer, x in zip((narrow, wide), inputs, strict=True)]
    assert calls == [(5, 128)]
    assert mx.allclose(found[0], expected[0], rtol=1e-4, atol=1e-5)
    assert mx.array_equal(found[1], expected[1])
    narrow(inputs[0])
    assert calls[1:] == [(5, 64)]


@pytest.mark.parametrize("bias", [False, True])
def test_mended_products_of_experts(bias):
    experts = QuantizedSwitchLinear(64, 8, 3, bias=bias)
    x, indices = mx.random.normal((5, 1, 64)), mx.array([0, 0, 1, 2, 2])
    expected = experts(x, indices, sorted_indices=True)
    with oracle.mended_products():
        assert mx.allclose(experts(x, indices, sorted_indices=True), expected, rtol=1e-4, atol=1e-5)


# --- The command --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_on_the_ops_path_lily_is_stock(tmp_path, monkeypatch, capsys, mode):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    found = run(tmp_path, "--sequences", 1, "--positions", 4, "--mode", mode)
    entry = distance(found, "stock", "lily")
    assert (entry["mean_kl"], entry["worst_kl"], entry["top1_agreement"]) == (0, 0, 1)
    assert found["perplexity"]["lily"] == found["perplexity"]["stock"]
    assert found["perplexity"]["oracle"] != found["perplexity"]["stock"]
    assert (
        distance(found, "oracle", "lily")["mean_kl"] == distance(found, "oracle", "stock")["mean_kl"] > 1e-5
    )
    assert found["nearer"]["mean_difference"] == 0
    assert found["about"]["lily_kernels"] == {}
    printed = capsys.readouterr().out
    assert "Neither is measurably nearer" in printed
    assert "1 sequences of 4 tokens from heldout.txt" in " ".join(printed.split())


def test_steps_of_a_prefill_against_one_another(tmp_path, monkeypatch, capsys, small):
    """Each engine against itself; stock's model here forgets, so that its result depends on the step."""
    monkeypatch.setenv("LILY_BACKEND", "ops")
    monkeypatch.setattr(numerics, "_load", lambda model: (small, Characters()))
    forced, asked = numerics.teacher_forced, []

    def forgetful(model, tokens, step, advance):
        asked.append(list(step))
        logits = forced(model, tokens, step, advance)
        return logits + (model is small) * len(step) * (np.arange(logits.shape[-1]) == 3)

    monkeypatch.setattr(numerics, "teacher_forced", forgetful)
    words = ("--sequences", 1, "--positions", 7, "--prefill-step-size", 5, "--oracle-device", "none")
    found = run(tmp_path, *words, "--against-steps", "2,7")
    assert asked == [[5, 2]] * 2 + [[2, 2, 2, 1]] * 2 + [[7]] * 2
    for step in (2, 7):
        assert distance(found, "lily", f"lily, step {step}")["mean_kl"] < 1e-6  # rounding in another order
        assert distance(found, "stock", f"stock, step {step}")["mean_kl"] > 1e-4
    assert found["settings"]["against_steps"] == [2, 7]
    assert "lily, step 2" in capsys.readouterr().out


class Characters:
    """A tokenizer of one token a character."""

    def encode(self, text):
        return [ord(c) % 128 for c in text]

    def decode(self, tokens):
        return "".join(map(chr, tokens))


def test_turns_have_figures_of_their_own(tmp_path, monkeypatch, capsys, small):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    monkeypatch.setattr(numerics, "_load", lambda model: (small, Characters()))
    turns = ("--turns", 3, "--turn-tokens", 6, "--mode", "decode")
    found = run(tmp_path, "--sequences", 1, *turns, "--oracle-device", "none")
    assert [d["positions"] for turn in found["turns"] for d in turn["distances"]] == [6, 6, 6]
    assert distance(found, "stock", "lily")["positions"] == 18
    assert all(turn["nearer"] is None for turn in found["turns"])
    assert "turn by turn" in capsys.readouterr().out


def test_passes_of_a_chat():
    """The first half of a turn is its prompt, the second is decoded; a prefill reads whole turns."""
    args = arguments("--turns", 2, "--turn-tokens", 7, "--mode", "decode", "--prefill-step-size", 3)
    prefill, lengths, parts = numerics._passes(args, 14)
    assert lengths == [3, 1, 1, 1, 1] * 2
    assert prefill == [3, 3, 1] * 2
    assert parts == [slice(0, 7), slice(7, 14)]


def test_against_stored_logits(tmp_path, reference, monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    words = ("--sequences", 1, "--positions", 6, "--oracle-device", "none")
    found = run(tmp_path, "--against", "hf", "--reference", DATA / "reference.npz", *words)
    tokens, logits = reference
    logits = logits[0, :6].astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -log_p[np.arange(5), tokens[0, 1:6]]
    assert found["perplexity"]["hf"] == pytest.approx(np.exp(nll.mean()), rel=1e-6)
    entry = distance(found, "hf", "stock")
    assert 1e-3 < entry["mean_kl"] < 0.5  # the 4 bits; unrelated distributions are several nats apart
    assert distance(found, "hf", "lily")["mean_kl"] == entry["mean_kl"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sequences", 0], "--sequences is 0"),
        (["--positions", 1], "--positions is 1; it must be at least 2"),
        (["--prefill-step-size", -4], "--prefill-step-size is -4"),
        (["--positions", 10**6], "need 8000000"),
        (["--text", "absent.txt"], "'absent.txt' is not a file"),
        (["--against", "hf"], "--hf-model"),
        (["--reference", "absent.npz"], "absent.npz is not an .npz file"),
        (["--reference", DATA / "heldout.txt"], "not an .npz file"),
        (["--reference", DATA / "reference.npz", "--turns", 2], "leave out --text and --turns"),
        (["--reference", "a", "--hf-model", "b"], "come from one of them"),
        (["--against-steps", "64,2048"], "--against-steps has 2048"),
        (["--against-steps", "0"], "--against-steps has 0; it must be at least 1"),
        (["--against-steps", "64", "--mode", "decode"], "leave out --turns and --mode decode"),
        (["--json", "absent/x.json"], "whose folder does not exist"),
    ],
)
def test_bad_input_is_one_clear_line(words, message):
    args = arguments(*words)
    with pytest.raises(UsageError) as caught:
        args.run(args)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_outside_a_checkout_a_text_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(numerics, "HELDOUT", tmp_path / "heldout.txt")
    args = arguments()
    with pytest.raises(UsageError, match="--text FILE is needed"):
        args.run(args)


def test_steps_that_are_no_numbers_are_one_clear_line(capsys):
    with pytest.raises(SystemExit):
        arguments("--against-steps", "64,x")
    assert "'64,x' is no list of numbers of tokens, as 64,512 is" in capsys.readouterr().err


@pytest.mark.skipif(mx.cuda.is_available(), reason="a CUDA device is here")
def test_the_bridge_needs_cuda():
    args = arguments("--stock-bridged")
    with pytest.raises(UsageError, match="needs a CUDA device"):
        args.run(args)


def test_an_interruption_leaves_nothing(tmp_path, monkeypatch, capsys):
    file = tmp_path / "numerics.json"

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(numerics, "teacher_forced", interrupted)
    args = arguments("--sequences", 1, "--positions", 4, "--json", file)
    assert args.run(args) == 130
    assert "nothing was written" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
