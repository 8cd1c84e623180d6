"""bench/graph.py against counts by hand, the limits of the full shape, and on the tiny checkpoint."""

import argparse
import copy
import json
from collections import Counter

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import lily_mlx
from bench import graph, oracle, random_weights
from lily_mlx.errors import UsageError
from lily_mlx.layers import attention
from lily_mlx.ops import trust
from tests.conftest import TINY
from tests.launch.test_trace import ATTENTION, DELTA_NET, MOE

CONFIG = random_weights.read_config("qwen3.6-35b-a3b")


def cut(layers):
    """The full config with fewer layers."""
    config = copy.deepcopy(CONFIG)
    config["text_config"]["num_hidden_layers"] = layers
    return config


@pytest.fixture(scope="module")
def model():
    """Full width, one period of layers: three DeltaNet, one attention."""
    return graph._from_config(cut(4))


@pytest.fixture(scope="module")
def decode(model):
    return graph.report(model, "decode", 1, 300, {"a": 100.0, "b": 200.0})


def launches(engine):
    counts = Counter({row["name"]: row["dispatches"] for row in engine["by_primitive"]})
    for name in list(counts):
        if name.startswith("gated_delta_step"):
            counts["gated_delta_step"] += counts.pop(name)
    return counts


def arguments(*words):
    parser = argparse.ArgumentParser()
    graph.add_parser(parser.add_subparsers())
    return parser.parse_args(["graph", *map(str, words)])


def test_weights_take_no_memory_and_keep_their_types(model):
    before = mx.get_active_memory()
    again = graph._from_config(cut(4))
    mx.eval(again.parameters())
    assert mx.get_active_memory() - before < 1e6
    types = {name: array.dtype for name, array in tree_flatten(again.parameters())}
    layer = "language_model.model.layers.0."
    assert types[layer + "linear_attn.A_log"] == mx.float32  # as checkpoints store it
    assert types[layer + "linear_attn.in_proj_qkv.scales"] == mx.bfloat16
    assert types[layer + "mlp.switch_mlp.gate_proj.weight"] == mx.uint32
    experts = dict(tree_flatten(again.parameters()))[layer + "mlp.switch_mlp.gate_proj.weight"]
    assert experts.shape == (256, 512, 2048 // 8)


def test_stock_counted_by_hand(decode):
    outside = Counter(Gather=3, Dequantize=1, RMSNorm=1, QuantizedMatmul=1)
    expected = outside + ATTENTION
    for _ in range(3):
        expected += DELTA_NET
    for _ in range(4):
        expected += MOE
    stock = decode["engines"]["stock"]
    assert launches(stock) == expected
    assert stock["dispatches"] == expected.total()
    assert stock["stages"] == 3 * 24 + 21 + 4


def test_lily_is_traced_with_its_own_kernels(decode):
    stock, lily = (set(launches(decode["engines"][name])) for name in ("stock", "lily"))
    assert "gated_delta_step" in stock - lily
    assert any(name.startswith("lily_gated_delta") for name in lily)
    assert not any(name.startswith("lily") for name in stock)


def test_lily_reads_the_chosen_experts_only(decode):
    rows = [r for r in decode["engines"]["lily"]["by_primitive"] if r["name"].startswith("lily_expert")]
    # Four layers of 8 routed experts and a shared one: gate, up and down at 4.5 bits a weight.
    weights = 4 * (8 + 1) * 3 * 512 * 2048 * 4.5 / 8
    assert sum(row["bytes_read"] for row in rows) == pytest.approx(weights, rel=0.02)


# Launches of each part of a prompt's chunk in Lily's kernels, with the norm before and the residual after it.
# Attention is MLX's, which Metal runs as products where a head has 256 numbers.
PREFILL = {
    "outside": {"Gather": 3, "Dequantize": 1, "RMSNorm": 1, "QuantizedMatmul": 1, "Full": 2},
    "delta_net": {
        "RMSNorm": 1,
        "lily_qmm": 2,
        "lily_gated_delta_prepare": 1,
        "lily_gated_delta_scan": 1,
        "lily_gated_rms_norm": 1,
        "Add": 1,
    },
    "attention": {
        "RMSNorm": 1,
        "lily_qmm": 2,
        "lily_qk_prepare": 1,
        "Multiply": 1,
        "Matmul": 2,
        "Arange": 2,
        "GreaterEqual": 1,
        "Select": 1,
        "Softmax": 1,
        "lily_attention_gate": 1,
        "Add": 1,
    },
    "moe": {
        "RMSNorm": 1,
        "lily_qmm": 1,
        "lily_expert_choose": 1,
        "lily_expert_scatter": 1,
        "lily_expert_gemm_gate_up": 1,
        "lily_expert_gemm_down": 1,
        "lily_expert_combine": 1,
        "Add": 1,
    },
}


@pytest.mark.parametrize("tokens", [256, 2048])  # whole steps of the KV cache: no copy into a larger one
def test_lilys_prefill_counted_by_hand(model, tokens):
    found = graph.trace_pass(lily_mlx.convert(oracle.twin(model)), "decode", tokens, 0)
    part = {name: Counter(launches) for name, launches in PREFILL.items()}
    expected = part["outside"] + part["attention"]
    for _ in range(3):
        expected += part["delta_net"]
    for _ in range(4):
        expected += part["moe"]
    assert launches({"by_primitive": graph._by_primitive(found)}) == expected
    assert part["delta_net"].total() + part["moe"].total() == 15


def test_a_chunk_costs_no_more_than_its_context(model):
    """No launch grows with the context beyond a bound, and a chunk's time is linear in it."""
    lily = lily_mlx.convert(oracle.twin(model))
    found = {}
    for context in (16384, 32768, 65536):
        chunk = graph.trace_pass(lily, "decode", 2048, context)
        scores = [a for p in chunk if p.name == "Matmul" for a in p.outputs if a.shape[-1] > 2048]
        # 16 heads of queries by keys; a row of queries more or less
        assert max(a.size for a in scores) <= 16 * attention.MAX_PAIRS
        # No launch moves more than one that reads and writes such scores in bfloat16. The output head, MLX's
        # only quantised product here, does not see the context.
        moved = [p.bytes_read + p.bytes_written for p in chunk if p.name != "QuantizedMatmul"]
        assert len(moved) == len(chunk) - 1
        assert max(moved) <= 16 * attention.MAX_PAIRS * (2 + 2)
        found[context] = sum(p.bytes_read + p.bytes_written for p in chunk)
    first, second = found[32768] - found[16384], found[65536] - found[32768]
    assert second == pytest.approx(2 * first, rel=0.05)


def test_context_costs_a_token_of_lily_what_it_costs_of_stock(model):
    """In bytes, but for the partial results of more blocks of keys; in launches nothing."""
    found = [graph.report(model, "decode", 1, context, {})["engines"] for context in (4096, 32768)]

    def added(name, *keys):
        return sum(found[1][name][key] - found[0][name][key] for key in keys)

    moved = {name: added(name, "bytes_read", "bytes_written") for name in ("stock", "lily")}
    assert moved["lily"] < 1.02 * moved["stock"]
    assert added("lily", "dispatches") == 0


def test_names_are_of_kernels_not_of_their_variants(decode):
    for engine in decode["engines"].values():
        for row in engine["by_primitive"]:
            assert "__" not in row["name"]
            assert not row["name"].rsplit("_", 1)[-1].isdigit()


def test_a_trace_takes_no_memory_for_weights(model):
    """Nor for the matrices that the layers join: those of one full layer's experts are 0.45 GB."""
    model = lily_mlx.convert(oracle.twin(model))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    graph.trace_pass(model, "decode", 1, 300)
    assert mx.get_peak_memory() - before < 2e7


@pytest.mark.skipif(mx.metal.is_available(), reason="a Metal device is here, and its self-checks count")
def test_self_checks_do_not_run_in_a_trace(model, monkeypatch):
    trust.distrust.cache_clear()
    for op in trust._checks:
        monkeypatch.setitem(trust._checks, op, lambda backend: "ran")
    found = graph.trace_pass(lily_mlx.convert(oracle.twin(model)), "decode", 1, 300)
    assert any(p.name.startswith("lily_gated_delta") for p in found)


def test_totals_and_bounds_add_up(decode):
    for engine in decode["engines"].values():
        for key in ("dispatches", "bytes_read", "bytes_written"):
            assert sum(row[key] for row in engine["by_primitive"]) == engine[key]
    least = decode["limit"]["bytes"]
    assert [b["tokens_per_s"] for b in decode["bounds"]] == [100e9 / least, 200e9 / least]
    assert decode["reference_engine"] is None  # not its model: four layers
    moved = decode["engines"]["stock"]["bytes_read"] + decode["engines"]["stock"]["bytes_written"]
    assert least < moved < 1.1 * least


def test_context_costs_the_bytes_of_its_keys_and_values(model, decode):
    """Two arrays of 2 heads of 256 bfloat16 values a position, in one of four layers."""
    longer = graph.report(model, "decode", 1, 3300, {})
    added = longer["limit"]["bytes"] - decode["limit"]["bytes"]
    assert added == 3000 * 2 * 2 * 256 * 2
    read = longer["engines"]["stock"]["bytes_read"] - decode["engines"]["stock"]["bytes_read"]
    # Two passes over more than 1,024 keys: a few partial results more.
    assert read == pytest.approx(added, rel=0.02)


def test_attention_over_a_short_cache_is_one_launch(model):
    lily = lily_mlx.convert(oracle.twin(model))
    short, long = (
        launches({"by_primitive": graph._by_primitive(graph.trace_pass(lily, "decode", 1, context))})
        for context in (300, 4096)
    )
    assert short["lily_attention_decode"] == 1
    assert long - short == {"lily_attention_combine": 1}
    assert short - long == {}


def test_a_prefill_has_no_output_head(model):
    found = graph.trace_pass(model, "prefill", 70, 0)
    assert not any(CONFIG["text_config"]["vocab_size"] in a.shape for p in found for a in p.outputs)
    whole = graph.trace_pass(model, "decode", 70, 0)
    assert any(CONFIG["text_config"]["vocab_size"] in a.shape for p in whole for a in p.outputs)
    after = graph.trace_pass(model, "prefill", 70, 300)
    keys = [a.shape for p in after if p.name == "SliceUpdate" for a in p.outputs]
    assert keys == [(1, 2, 370, 256)] * 2


def test_the_full_shape():
    """The limits counted by hand: 1.64 GB of weights, 22 MB of gates, 126 MB of state, 84 MB of cache."""
    args = arguments("--random-weights", "qwen3.6-35b-a3b")
    model = graph._from_config(random_weights.read_config(args.random_weights))
    found = graph.report(model, "decode", 1, 4096, {"M5 Max": 614})
    assert found["limit"]["bytes"] == pytest.approx(1.64e9 + 22e6 + 126e6 + 84e6, rel=0.01)
    assert found["bounds"][0]["tokens_per_s"] == pytest.approx(326, rel=0.01)
    assert found["reference_engine"] == {"dispatches": 795, "stages": 555}
    for engine in found["engines"].values():
        assert 1 < (engine["bytes_read"] + engine["bytes_written"]) / found["limit"]["bytes"] < 1.05
    assert found["engines"]["lily"]["dispatches"] <= 320
    assert found["engines"]["lily"]["stages"] <= 300


def test_the_command_on_a_checkpoint(tmp_path, capsys):
    file = tmp_path / "graph.json"
    args = arguments("--model", TINY, "--context", 20, "--bandwidth", 50, "--top", 2, "--json", file)
    assert args.run(args) == 0
    found = json.loads(file.read_text())
    printed = capsys.readouterr().out
    assert f"{found['engines']['stock']['dispatches']:,}" in printed
    assert "this bandwidth" in printed
    assert (
        f"and {len({r['name'] for e in found['engines'].values() for r in e['by_primitive']}) - 2} more"
        in printed
    )
    assert found["reference_engine"] is None
    assert [b["gb_per_s"] for b in found["bounds"]] == [50]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", 0], "--tokens is 0; it must be at least 1"),
        (["--context", -1], "--context is -1"),
        (["--bandwidth", 0], "--bandwidth is 0.0; it must be above 0"),
        (["--bandwidth", "nan"], "--bandwidth is nan"),
        (["--bandwidth", "inf"], "--bandwidth is inf"),
        (["--context", 99999999999], "--context is 99999999999; it must be at most 1048576"),
        (["--top", 0], "--top is 0"),
        (["--json", "absent/x.json"], "whose folder does not exist"),
    ],
)
def test_bad_input_is_one_clear_line(words, message):
    args = arguments("--random-weights", "qwen3.6-35b-a3b", *words)
    with pytest.raises(UsageError) as caught:
        args.run(args)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_model_is_one_clear_line():
    args = arguments("--random-weights", "absent")
    with pytest.raises(UsageError, match=r"'absent'.*qwen3\.6-35b-a3b"):
        args.run(args)
