"""Public reports about this architecture, as checks on the plugin. The letter is the case."""

import json
import sys

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, BatchKVCache, QuantizedKVCache, make_prompt_cache

import lily_mlx
from lily_mlx.counters import counts
from tests.conftest import TINY

TOKENS = 8


def single(model, prompt, count=TOKENS, **kwargs):
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count, **kwargs)]


@pytest.fixture(params=["ops", "host"])
def backend(request, monkeypatch):
    """MLX's ops, then Lily's kernels, which every test that asks for both has to reach."""
    monkeypatch.setenv("LILY_BACKEND", request.param)
    counts.clear()
    yield request.param
    assert any(name.startswith("op.") for name in counts) == (request.param == "host")


@pytest.fixture(scope="module")
def small():
    """A small seeded model of Lily's, 4 bits, float32."""
    from tests.models.test_small_model import build

    return build()[1]


@pytest.fixture
def model(backend, lily, small):
    """For MLX's ops the tiny trained checkpoint, whose rows are equal to the bit; for kernels the small one.

    Kernels add up many rows in another order than one. In bfloat16 that decides near ties, in float32 none.
    """
    return lily[0] if backend == "ops" else small


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(3)
    return [rng.integers(0, 128, n).tolist() for n in (12, 3, 41)]


def test_a_batch_rows_equal_their_single_runs(model, lily, prompts):
    expected = [single(model, p) for p in prompts]
    for step in (8, 2048):
        assert run_batch(model, lily[1], prompts, prefill_step_size=step) == expected, step


def run_batch(model, tokenizer, prompts, **kwargs):
    result = batch_generate(model, tokenizer, prompts, max_tokens=TOKENS, return_token_ids=True, **kwargs)
    return [list(map(int, row)) for row in result.token_ids]


@pytest.mark.parametrize("neighbour", [5, 50, 500])
@pytest.mark.usefixtures("backend")
def test_b_a_row_does_not_see_its_neighbour(small, neighbour):
    """Greedy tokens after a row of 20, beside a neighbour of any length."""
    rng = np.random.default_rng(0)
    row, other = (rng.integers(0, 128, n).tolist() for n in (20, neighbour))
    beside = padded_batch(small, [row, other], BatchKVCache)[0]
    assert beside == padded_batch(small, [row], BatchKVCache)[0]
    assert beside == single(small, row)


class LeftPaddedQuantizedKVCache:
    """Stock's 8-bit cache behind what attention asks of a left-padded one: offsets a row for rope, a mask
    that hides the padding. Stock has no such class."""

    def __init__(self, padding):
        self.cache = QuantizedKVCache(group_size=64, bits=8)
        self.bits, self.group_size = self.cache.bits, self.cache.group_size
        self.update_and_fetch = self.cache.update_and_fetch
        self.padding = mx.array(padding)

    @property
    def offset(self):
        return self.cache.offset - self.padding

    def make_mask(self, N, **kwargs):
        return create_causal_mask(N, self.cache.offset, left_padding=self.padding)


def padded_batch(model, rows, attention_cache, count=TOKENS):
    """Greedy tokens of each row of a left-padded batch."""
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    cache = [
        ArraysCache(2, left_padding=padding) if layer.is_linear else attention_cache(padding)
        for layer in model.layers
    ]
    tokens = mx.array([[0] * pad + row for pad, row in zip(padding, rows, strict=True)])
    out = []
    for _ in range(count):
        tokens = model(tokens, cache=cache)[:, -1:].argmax(-1)
        out.append(tokens)
    return mx.concatenate(out, axis=1).tolist()


@pytest.mark.usefixtures("backend")
def test_c_batch_with_quantised_kv_cache(small, prompts):
    batch = padded_batch(small, prompts, LeftPaddedQuantizedKVCache)
    assert batch == [padded_batch(small, [row], lambda _: QuantizedKVCache(64, 8))[0] for row in prompts]


def test_d_quantised_kv_cache_keeps_the_tokens(backend, model, lily, prompts):
    prompt = lily[1].encode("Complete this function: def add(a, b):") if backend == "ops" else prompts[0]
    plain = single(model, prompt, 24)
    quantised = single(model, prompt, 24, kv_bits=8, quantized_kv_start=0)
    assert quantised == plain
    assert len(set(plain)) > 8  # no loop of a repeated token


def small_moe(**changes):
    """A seeded small MoE model's config, flat or nested by model type."""
    text = {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 128,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "rms_norm_eps": 1e-6,
        **changes,
    }
    return {"model_type": "qwen3_5_moe", "text_config": text}


def save_hugging_face_layout(path, config, weights):
    """Save an MLX model's weights as Hugging Face lays them out: zero-centred norms, conv1d [C, 1, K], gate
    and up of all experts in one tensor, all under model.language_model."""
    out = {}
    norms = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")
    for name, value in weights.items():
        name = name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        )
        if name.endswith(norms):
            value = value - 1
        elif name.endswith("conv1d.weight"):
            value = value.moveaxis(2, 1)
        if ".switch_mlp.up_proj" in name:
            continue
        if ".switch_mlp.gate_proj.weight" in name:
            up = weights[source_of(name).replace("gate_proj", "up_proj")]
            name, value = (
                name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj"),
                mx.concatenate([value, up], 1),
            )
        name = name.replace("switch_mlp.down_proj.weight", "experts.down_proj")
        out[name] = value
    path.mkdir(exist_ok=True)
    mx.save_safetensors(str(path / "model.safetensors"), out)
    (path / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (path / file).write_bytes((TINY / file).read_bytes())
    return out


def source_of(name):
    return name.replace("model.language_model.", "language_model.model.")


def test_e_mtp_keys_are_ignored_and_norms_shifted_once(tmp_path, same):
    """Raw layout: norms get their 1 once although mtp.* norms are there. Converted layout: not at all."""
    from mlx_lm.models import qwen3_5_moe

    mx.random.seed(0)
    config = small_moe()
    model = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(config))
    weights = {k: v + 0.25 if k.endswith("norm.weight") else v for k, v in tree_flatten(model.parameters())}
    model.load_weights(list(weights.items()))
    tokens = mx.array([[1, 2, 3, 4, 5]])
    expected = model(tokens)

    raw = tmp_path / "raw"
    saved = save_hugging_face_layout(raw, config, weights)
    mtp = {"mtp.norm.weight": mx.ones((64,)), "mtp.layers.0.input_layernorm.weight": mx.zeros((64,))}
    mx.save_safetensors(str(raw / "model.safetensors"), saved | mtp)
    loaded, _ = lily_mlx.load(raw)
    same(loaded(tokens), expected)

    converted = tmp_path / "converted"
    save_hugging_face_layout(converted, config, weights)
    mx.save_safetensors(str(converted / "model.safetensors"), weights | mtp)
    loaded, _ = lily_mlx.load(converted)
    same(loaded(tokens), expected)


@pytest.mark.parametrize("flat", [False, True])
def test_f_norm_topk_prob_is_true_unless_said(flat, same):
    from lily_mlx.models import qwen3_5_moe

    def logits(config):
        mx.random.seed(1)
        if flat:
            config = {**config["text_config"], "model_type": "qwen3_5_moe"}
        model = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(config))
        return model(mx.array([[1, 2, 3, 4]]))

    same(logits(small_moe()), logits(small_moe(norm_topk_prob=True)))
    assert mx.any(logits(small_moe()) != logits(small_moe(norm_topk_prob=False))).item()


def test_g_the_registered_class_is_the_one_that_ran():
    counts.clear()
    lily_mlx.register()
    lily_mlx.register()
    try:
        model, _ = mlx_lm.load(str(TINY))
        assert type(model).__module__ == "lily_mlx.models.qwen3_5_moe"
        mx.eval(model(mx.array([[1, 2, 3]])))
        assert counts["model.qwen3_5_moe"] == 1
    finally:
        lily_mlx.unregister()
        lily_mlx.unregister()
    model, _ = mlx_lm.load(str(TINY), lazy=True)
    assert type(model).__module__ == "mlx_lm.models.qwen3_5_moe"


def test_g_unregister_gives_back_what_was_there(monkeypatch):
    monkeypatch.setitem(utils.MODEL_REMAPPING, "qwen3_5", "somebody_elses")
    before = dict(utils.MODEL_REMAPPING)
    lily_mlx.register()
    lily_mlx.register()
    assert utils.MODEL_REMAPPING["qwen3_5"] != "somebody_elses"
    lily_mlx.unregister()
    lily_mlx.unregister()
    assert before == utils.MODEL_REMAPPING


def test_g_load_changes_nothing_for_other_threads(monkeypatch):
    """While lily_mlx.load runs, another thread's mlx_lm.load gives stock's class."""
    stock, seen = utils.load_model, []

    def load_model(*args, **kwargs):
        seen.append(utils._get_classes({"model_type": "qwen3_5_moe"})[0].__module__)
        return stock(*args, **kwargs)

    monkeypatch.setattr(utils, "load_model", load_model)
    model, _ = lily_mlx.load(TINY, lazy=True)
    assert type(model).__module__ == "lily_mlx.models.qwen3_5_moe"
    assert seen == ["mlx_lm.models.qwen3_5_moe"]


def test_g_the_next_command_of_a_process_is_stocks_again(run_in_process):
    before = utils.load_model, utils.load_tokenizer, utils.load_adapters, utils._download, sys.excepthook
    words = ("--model", TINY, "--prompt", "x", "--max-tokens", 1)
    counts.clear()
    assert run_in_process("generate", *words)[0] == 0
    assert counts["model.qwen3_5_moe"] > 0
    counts.clear()
    assert run_in_process("generate", *words, engine="mlx")[0] == 0
    assert not counts
    after = utils.load_model, utils.load_tokenizer, utils.load_adapters, utils._download, sys.excepthook
    assert after == before


@pytest.mark.parametrize("engine", ["lily", "mlx", "auto"])
def test_g_from_the_command_line_too(run_cli, engine):
    words = ("mlx_lm.generate", "--engine", engine, "--model", TINY, "--prompt", "x", "--max-tokens", "3")
    result = run_cli(*words, env={"LILY_STATS": "1"})
    assert result.returncode == 0, result.stderr
    assert ("model.qwen3_5_moe=" in result.stderr) == (engine != "mlx")


def test_h_works_without_metal_and_cuda(run_cli):
    result = run_cli("python", "-c", "import lily_mlx; print(lily_mlx.__version__)")
    assert result.returncode == 0
    assert run_cli("lily-mlx", "--help").returncode == 0
    result = run_cli("lily-mlx", "explain", "--model", TINY, "--json", env={"LILY_BACKEND": "ops"})
    report = json.loads(result.stdout)
    assert report["backend"]["used"] == "ops"
    assert {op["path"] for op in report["ops"]} == {"stock"}
    assert {op["phase"] for op in report["ops"]} == {"prefill", "decode"}


def test_h_import_builds_no_kernel_and_imports_no_mlx(run_cli):
    result = run_cli("python", "-c", "import lily_mlx, sys; print('mlx.core' in sys.modules)")
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize("used", ["ops", "host"])
def test_i_training_takes_the_differentiable_stock_path(same, monkeypatch, used):
    from mlx import nn
    from mlx_lm.models import qwen3_5_moe as stock_module

    from lily_mlx.models import qwen3_5_moe as lily_module

    monkeypatch.setenv("LILY_BACKEND", used)
    tokens = mx.array([[5, 6, 7, 8, 9, 10]])

    def gradients(module):
        mx.random.seed(2)
        model = module.Model(module.ModelArgs.from_dict(small_moe()))
        model.train()
        loss = nn.value_and_grad(
            model, lambda m: nn.losses.cross_entropy(m(tokens[:, :-1]), tokens[:, 1:]).mean()
        )
        return loss(model)

    (expected_loss, expected), (actual_loss, actual) = gradients(stock_module), gradients(lily_module)
    same(actual_loss, expected_loss)
    expected, actual = dict(tree_flatten(expected)), dict(tree_flatten(actual))
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        same(actual[name], value)


def test_caches_are_stocks_own(stock, lily):
    kinds = [type(c) for c in make_prompt_cache(lily[0])]
    assert kinds == [type(c) for c in make_prompt_cache(stock[0])]
    assert QuantizedKVCache not in kinds
