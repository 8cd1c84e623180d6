"""lily-mlx bench on a seeded small model: what is measured in which order, kept, resumed and refused."""

import json
import os

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gated_delta, qwen3_next

from bench import ab, arms, costs, gate, plots, random_weights, record
from bench.oracle import twin
from lily_mlx import cli
from lily_mlx.errors import UsageError
from tests.plugin.test_cases import small_moe


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config file of a small MoE model in 4 bits."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    path.write_text(json.dumps(small_moe(**sizes) | {"quantization": {"group_size": 64, "bits": 4}}))
    return path


@pytest.fixture(scope="module")
def model(config):
    return random_weights.build(random_weights.read_config(str(config)))


@pytest.fixture
def bench(config, tmp_path, monkeypatch):
    """Run ``lily-mlx bench`` on the small model, with a short gate; returns the exit status."""
    monkeypatch.setattr(gate, "TOKENS", 6)
    monkeypatch.setattr(gate, "CHUNK", 4)
    monkeypatch.setattr(costs, "peaks", lambda: {"bandwidth": 1e10, "matrix_peak": 1e11})
    monkeypatch.setattr(plots, "draw", lambda groups, folder: {})  # tests/bench/test_compare.py draws

    def run(*words, output=tmp_path / "out"):
        options = {
            "--random-weights": config,
            "--arms": "stock,stock+,lily",
            "--lengths": "2,5",
            "--rounds": 2,
            "--decode-tokens": 1,
            "--prefill-step-size": 3,
            "--output": output,
        }
        flags = [str(word) for pair in options.items() for word in pair]
        return cli.main(["bench", *flags, *map(str, words)])

    run.output = tmp_path / "out"
    return run


def lines_of(bench):
    return list(record.read(bench.output))


def test_a_run_writes_every_measurement_once_in_alternating_order(bench, capsys):
    assert bench() == 0
    lines = lines_of(bench)
    names = ["stock", "stock+", "lily"]
    sequence = [
        (length, phase, round_, position, arm)
        for length in (2, 5)
        for phase in ("prefill", "decode")
        for round_, turn in enumerate((names, names[::-1]))
        for position, arm in enumerate(turn)
    ]
    assert [(x["length"], x["phase"], x["round"], x["order"], x["arm"]) for x in lines] == sequence
    for line in lines:
        assert line["tokens"] == (line["length"] if line["phase"] == "prefill" else 1)
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
        assert line["peak_memory_bytes"] > 0
        assert line["nax"] is False or mx.metal.is_available()
        assert line["mlx"] == mx.__version__
        assert set(line) == set(record.FIELDS)
    assert {x["arm"]: x["switches"]["engine"] for x in lines} == {
        "stock": "mlx",
        "stock+": "mlx",
        "lily": "lily",
    }
    assert "prefill: median tokens a second" in capsys.readouterr().out
    assert "| 5 |" in (bench.output / "report.md").read_text()


def test_an_interrupted_run_keeps_its_lines_and_is_resumed(bench, monkeypatch, capsys):
    timed, calls = ab._timed, []

    def interrupted_once(arm, measure):
        calls.append(arm.name)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return timed(arm, measure)

    monkeypatch.setattr(ab, "_timed", interrupted_once)
    assert bench() == 130
    assert "--resume" in capsys.readouterr().err
    kept = lines_of(bench)
    assert len(kept) == 4
    with (bench.output / record.FILE).open("a") as file:
        file.write('{"half a li')  # killed while it wrote
    assert bench("--resume") == 0
    assert len(calls) == 5 + 20
    lines = lines_of(bench)
    assert lines[:4] == kept
    assert len({(x["run"], x["phase"], x["length"], x["arm"], x["round"]) for x in lines}) == 24
    assert len({x["run"] for x in lines}) == 1
    assert bench("--resume") == 0
    assert len(calls) == 25


def test_a_folder_is_not_mixed_with_another_run(bench, monkeypatch, capsys):
    monkeypatch.setattr(gate, "check", lambda *arguments: 1 / 0)
    bench.output.mkdir()
    (bench.output / record.FILE).touch()
    (bench.output / ab.SETTINGS_FILE).write_text('{"run": "a", "model": "another"}')
    for words, said in (((), "add --resume"), (("--resume",), "was measured with 'another'")):
        with pytest.raises(SystemExit) as stopped:
            bench(*words)
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", "1", '{"model": "m"}', None])
def test_a_damaged_description_is_one_line(text, bench, capsys):
    file = bench.output / ab.SETTINGS_FILE
    bench.output.mkdir()
    file.mkdir() if text is None else file.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        bench("--resume")
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(file) in error


def test_two_runs_do_not_write_to_one_folder(bench, monkeypatch, capsys):
    timed, said = ab._timed, []

    def with_another_run(arm, measure):
        if not said:
            for words in ((), ("--resume",)):
                with pytest.raises(SystemExit) as stopped:
                    bench(*words)
                assert stopped.value.code == 2
                said.append(capsys.readouterr().err)
        return timed(arm, measure)

    monkeypatch.setattr(ab, "_timed", with_another_run)
    assert bench() == 0
    assert all("another lily-mlx bench writes to" in text and text.count("\n") == 1 for text in said)
    assert len(said) == 2
    assert len(lines_of(bench)) == 24


def test_the_slower_of_two_runs_that_start_together_gives_way(bench, monkeypatch, capsys):
    checked = gate.check

    def while_another_run_ends(*arguments):
        monkeypatch.setattr(gate, "check", checked)
        assert bench() == 0
        return checked(*arguments)

    monkeypatch.setattr(gate, "check", while_another_run_ends)
    with pytest.raises(SystemExit) as stopped:
        bench()
    assert stopped.value.code == 2
    assert "holds measurements already" in capsys.readouterr().err
    assert len(lines_of(bench)) == 24


def test_the_time_limit_begins_nothing_that_would_end_later(bench, monkeypatch, capsys):
    monkeypatch.setattr(
        ab.Clock, "allows", lambda self, seconds=0.0: len(self.asked) < 6 and not self.asked.append(1)
    )
    monkeypatch.setattr(ab.Clock, "asked", [], raising=False)
    assert bench("--time-limit", 1000) == 0
    assert len(lines_of(bench)) == 2  # four warm-ups, two of them lily's, and two measurements were allowed
    assert "time limit of 1000 s" in capsys.readouterr().out


def test_clock():
    assert ab.Clock(None).allows(1e9)
    assert ab.Clock(100).allows(50)
    assert not ab.Clock(100).allows(200)
    assert not ab.Clock(0).allows()


def test_a_wrong_engine_is_refused(bench, monkeypatch, capsys):
    make = arms.make

    def one_wrong_layer(names, model):
        made = make(names, model)
        layer, text = made[-1].model.layers[1].linear_attn, made[-1].model.language_model
        layer.out_proj, text.lm_head = twin(layer.out_proj), twin(text.lm_head)
        layer.out_proj.scales = -layer.out_proj.scales
        layer.out_proj.biases = -layer.out_proj.biases
        text.lm_head.scales = text.lm_head.scales[::-1]
        return made

    monkeypatch.setattr(arms, "make", one_wrong_layer)
    assert bench() == 1
    error = capsys.readouterr().err
    assert error.startswith("lily-mlx: error: arm lily differs from stock by ")
    assert error.count("\n") == 1
    assert not bench.output.exists()


def logits(seed=0, shape=(8, 64)):
    return mx.random.normal(shape, key=mx.random.key(seed))


def test_agreement_against_numpy():
    p, q = logits(0), logits(1)
    found = gate.agreement(p, q + 5.0)  # a constant changes nothing
    a, b = (np.array(x, dtype=np.float64) for x in (p, q))
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    pa, pb = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (a, b))
    assert found.relative_error == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-4)
    assert found.kl == pytest.approx((pa * np.log(pa / pb)).sum(-1).mean(), rel=1e-4)
    chosen = np.take_along_axis(a, b.argmax(-1)[:, None], axis=-1)[:, 0]
    assert found.top1 == (chosen >= a.max(-1) - gate.NEAR_TIE).mean()


def test_a_near_tie_is_no_disagreement_and_a_wrong_token_is():
    reference = mx.array([[4.0, 3.9, 0.0], [4.0, 0.0, 0.0], [4.0, 3.0, 0.0]])
    other = mx.array([[3.9, 4.0, 0.0], [4.0, 0.0, 0.0], [3.0, 4.0, 0.0]])
    assert gate.agreement(reference, other).top1 == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("error", "kl", "top1", "trained", "said"),
    [
        (0.05, 0.01, 0.95, True, None),
        (0.05, 0.30, 0.95, True, "nats"),
        (0.05, 0.01, 0.50, True, "most likely"),
        (0.05, 0.30, 0.50, False, None),
        (0.50, 0.01, 0.95, False, "differs from stock"),
        (float("nan"), 0.01, 0.95, False, "differs from stock"),
        (0.05, float("nan"), 0.95, True, "nats"),
    ],
)
def test_the_gate(error, kl, top1, trained, said):
    found = gate._wrong(gate.Agreement(error, kl, top1), trained)
    assert (said is None) == (found is None)
    assert said is None or said in found


def test_the_gate_at_a_length():
    gate.check_at_length("lily", "decode", 4096, logits()[0], logits()[0] * 1.1)
    for wrong in (logits(1)[0], mx.full((64,), float("nan"))):
        with pytest.raises(gate.GateError, match="decode at length 4096"):
            gate.check_at_length("lily", "decode", 4096, logits()[0], wrong)


def test_arms_share_matrices_and_nothing_else(model):
    before = type(model)
    stock, lily = arms.make(["stock", "lily"], model)
    assert type(model) is type(stock.model) is before
    assert type(lily.model).__module__.startswith("lily_mlx")
    own = {"GatedDeltaNet", "Attention", "SparseMoeBlock", "MLP"}
    for arm in (stock, lily):
        engine = "lily_mlx" if arm is lily else "mlx_lm"
        for (path, theirs), (_, ours) in zip(model.named_modules(), arm.model.named_modules(), strict=True):
            assert (ours is theirs) == (not ours.children()), path
            assert type(theirs).__module__.startswith(("mlx", "mlx_lm"))
            assert type(theirs).__name__ not in own or type(ours).__module__.startswith(engine)


def test_a_switch_is_off_only_while_its_arm_runs(model, monkeypatch):
    monkeypatch.setenv("LILY_DISABLE", "experts")
    (arm,) = arms.make(["lily-without-gated_delta_scan"], model)
    assert arm.switches()["disabled"] == ["experts", "gated_delta_scan"]
    with arm.active():
        assert os.environ["LILY_DISABLE"] == "experts,gated_delta_scan"
    assert os.environ["LILY_DISABLE"] == "experts"


@pytest.mark.parametrize("length", [5, 256])
def test_decode_starts_from_the_same_cache_every_time(model, length):
    context = ab.random_cache(model, length, seed=3)
    before = [np.array(x.astype(mx.float32)) for x in (context[3].keys, context[0][1])]
    assert context[3].keys.shape[2] == 256
    assert context[3].offset == length
    first, second = (ab._Decode(context, 3).logits(model) for _ in range(2))
    assert mx.array_equal(first, second)
    after = [np.array(x.astype(mx.float32)) for x in (context[3].keys, context[0][1])]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert context[3].offset == length


def test_a_random_cache_has_the_shape_of_a_prefilled_one(model):
    prompt = ab.random_prompt(128, 0)(300)
    filled, random = ab.prefilled_cache(model, prompt, 128), ab.random_cache(model, 300, 0)
    for a, b in zip(filled, random, strict=True):
        arrays = [(x.keys, x.values) if hasattr(x, "keys") else x.cache for x in (a, b)]
        assert [(x.shape, x.dtype) for x in arrays[0]] == [(x.shape, x.dtype) for x in arrays[1]]


def test_random_weights_are_quantised_codes_of_a_fixed_seed(config, model):
    again = random_weights.build(random_weights.read_config(str(config)))
    head, same = model.language_model.lm_head, again.language_model.lm_head
    assert mx.array_equal(head.weight, same.weight)
    assert head.scales.dtype == mx.bfloat16
    codes = np.array(head.weight).view(np.uint8)
    counts = np.bincount(np.concatenate([codes & 15, codes >> 4]).ravel(), minlength=16)
    assert abs(counts / counts.mean() - 1).max() < 0.3  # 8,192 codes: five standard deviations
    assert model.layers[0].mlp.gate.bits == 8
    out = model(mx.arange(16)[None])
    assert 0.3 < float(mx.std(out.astype(mx.float32))) < 3


def test_the_unquantised_weights_of_random_models_never_exist():
    config = small_moe(hidden_size=256, moe_intermediate_size=256, num_experts=64)
    config["quantization"] = {"group_size": 64, "bits": 4}
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    built = random_weights.build(config)
    experts = 4 * 3 * 64 * 256 * 256
    assert mx.get_active_memory() - before > 0.5625 * experts
    assert mx.get_peak_memory() - before < experts  # unquantised: twice that in bfloat16
    del built


def full_shape():
    """The built-in config's model, of which nothing is computed."""
    from mlx_lm.models import qwen3_5_moe

    config = random_weights.read_config("qwen3.6-35b-a3b")
    model = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(config))
    random_weights._quantize(model, config["quantization"])
    model.set_dtype(mx.bfloat16)
    return model


def test_limits_count_all_that_was_timed(monkeypatch):
    seconds = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: next(seconds))  # every sample takes a second
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    assert costs.peaks() == {"bandwidth": 8 * 2 * 4 * (8 << 20), "matrix_peak": 8 * 2 * 256**3}


def test_the_work_of_the_full_shape():
    """2.92 G active 4-bit weights, gates, state and 4,096 tokens of context are 1.88 GB a token."""
    model = full_shape()
    one = costs.decode(model, 4096, 1)
    assert one.bytes == pytest.approx(1.88e9, rel=0.01)
    grown = costs.decode(model, 8192, 1).bytes - one.bytes
    assert grown == 4096 * 10 * 2 * 2 * 256 * 2  # 20.5 KB a token of context
    chunk = costs.forward(model, 2048, 0, head=False)
    assert chunk.flops / 2048 == pytest.approx(4.8e9 + 0.28e9, rel=0.03)  # products; attention and recurrence
    assert costs.prefill(model, 4097, 2048).flops > 2 * chunk.flops


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output", "x"], "--model PATH, or --random-weights"),
        (["--random-weights", "qwen3.6-35b-a3b"], "--output DIR"),
        (["--random-weights", "qwen9", "--output", "x"], "'qwen9'; it must be a config.json"),
        (["--random-weights", "c", "--output", "x", "--arms", "stok"], "--arms names 'stok'"),
        (["--random-weights", "c", "--output", "x", "--arms", "lily-without-x"], "one of "),
        (["--random-weights", "c", "--output", "x", "--arms", "lily,lily"], "'lily' twice"),
        (["--random-weights", "c", "--output", "x", "--arms", ","], "at least one of"),
        (["--random-weights", "c", "--output", "x", "--phase", "both"], "--phase names 'both'"),
        (["--random-weights", "c", "--output", "x", "--lengths", "1K"], "--lengths is '1K'"),
        (["--random-weights", "c", "--output", "x", "--lengths", "1"], "at least 2 tokens"),
        (["--random-weights", "c", "--output", "x", "--lengths", ""], "--lengths is ''"),
        (["--random-weights", "c", "--output", "x", "--lengths", "999999999999"], "at most 1048576 tokens"),
        (["--random-weights", "c", "--output", "x", "--rounds", "0"], "--rounds is 0"),
        (["--random-weights", "c", "--output", "x", "--time-limit", "-1"], "--time-limit is -1"),
        (["--random-weights", "c", "--output", "x", "--cool-down", "nan"], "--cool-down is nan"),
        (["--random-weights", "c", "--output", "x", "--prompt-file", "p"], "needs a tokenizer"),
        (["--random-weights", "c", "--output", __file__], "which is a file"),
        (["--model", "/no/such", "--output", "x"], "'/no/such' is neither"),
        (
            ["--model", "m", "--output", "x", "--prompt-file", "/no/such"],
            "--prompt-file /no/such cannot be read",
        ),
    ],
)
def test_bad_input_is_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *words])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("lily-mlx: error: ")
    assert error.count("\n") == 1
    assert said in error
    assert not (tmp_path / "x").exists()


def test_arms_are_named_by_what_is_off():
    names = ["lily", "lily-without-qmv", "lily-without-expert_gemm", "lily-without-token_on_gpu"]
    assert arms.parse(",".join(names)) == names
    with pytest.raises(UsageError, match=r"NAME one of .*prompt_chunks"):
        arms.parse("lily-without-expert_scatter")  # a part of expert_route


def test_stock_plus_takes_the_faster_of_the_ops_that_exist(model, monkeypatch):
    calls = arms._attention_calls(model, 5, 9)
    assert calls["default"]().shape == (1, 4, 5, 32)
    assert arms._time(calls["default"]) < 10
    assert mx.metal.is_available() or arms._time(calls["force_fused"]) == float("inf")
    best = arms.BestOwnOps(model)
    seconds = {"default": 2.0, "force_fused": 1.0}
    monkeypatch.setattr(arms, "_time", lambda call: seconds[call])
    best._choose("attention", 5, {name: name for name in seconds})
    assert best.switches()["attention"] == {5: "force_fused"}


def test_stock_plus_calls_what_it_chose(model, monkeypatch):
    best = arms.BestOwnOps(model)
    best.chosen = {"gated_delta": {3: "mx.fast.gated_delta_update"}, "attention": {3: "force_fused"}}
    shape = (1, 3, 2, 32)
    q, k, v = (mx.random.normal(shape, key=mx.random.key(i)) * 0.2 for i in range(3))
    g, beta = mx.full(shape[:3], 0.9), mx.full(shape[:3], 0.5)
    state = mx.zeros((1, 2, 32, 32))
    for got, want in zip(
        best._scan(q, k, v, g, beta, state), gated_delta.gated_delta_ops(q, k, v, g, beta, state), strict=True
    ):
        assert mx.allclose(got, want, atol=1e-6)
    asked = []
    monkeypatch.setattr(
        mx.fast, "scaled_dot_product_attention", lambda q, k, v, **options: asked.append(options) or q
    )
    heads = q.transpose(0, 2, 1, 3)
    with best.active():
        for tokens in (heads, heads[:, :, :1]):
            qwen3_next.scaled_dot_product_attention(tokens, heads, heads, cache=None, scale=1.0, mask=None)
    assert [options.get("force_fused", False) for options in asked] == [True, False]
