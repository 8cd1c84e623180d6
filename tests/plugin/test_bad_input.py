"""Bad input ends with exit status 2 and one line that names the value and what would be right."""

import importlib
import json
import shutil
import struct

import pytest

from lily_mlx import hook
from tests.conftest import TINY


@pytest.fixture
def broken(tmp_path):
    """A copy of the tiny checkpoint to break."""
    path = tmp_path / "model"
    shutil.copytree(TINY, path)
    return path


def edit_config(path, **changes):
    """Change keys of the nested config; None deletes one."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    for key, value in changes.items():
        part = config if key == "model_type" else config["text_config"]
        if value is None:
            del part[key]
        else:
            part[key] = value
    file.write_text(json.dumps(config))


def check(result, *words):
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    for word in words:
        assert word in lines[0]


def cut_weights(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1_000_000])


def damage_header(path):
    file = path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 40) + file.read_bytes()[8:])


def remove(name):
    return lambda path: (path / name).unlink()


def write(name, text):
    return lambda path: (path / name).write_text(text)


def drop_a_tensor(path):
    import mlx.core as mx

    weights = mx.load(str(path / "model.safetensors"))
    del weights["language_model.model.layers.0.mlp.gate.weight"]
    mx.save_safetensors(str(path / "model.safetensors"), weights)


BREAKS = {
    "no weights": (remove("model.safetensors"), "model.safetensors"),
    "no weights, no index": (
        lambda p: (remove("model.safetensors")(p), remove("model.safetensors.index.json")(p)),
        "no model*.safetensors",
    ),
    "cut weights": (cut_weights, "damaged or cut short"),
    "damaged header": (damage_header, "damaged or cut short"),
    "no config": (remove("config.json"), "config.json is missing"),
    "config is not JSON": (write("config.json", "{"), "is not JSON"),
    "config is a list": (write("config.json", "[]"), "must be a JSON object"),
    "no model type": (lambda p: edit_config(p, model_type=None), "has no model_type"),
    "other model type": (lambda p: edit_config(p, model_type="llama"), "'llama'", "qwen3_5, qwen3_5_moe"),
    "missing keys": (
        lambda p: edit_config(p, hidden_size=None, num_experts=None),
        "lacks hidden_size, num_experts",
    ),
    "zero size": (lambda p: edit_config(p, hidden_size=0), "hidden_size is 0", "positive integer"),
    "text for a size": (lambda p: edit_config(p, vocab_size="many"), "vocab_size is 'many'"),
    "heads do not divide": (lambda p: edit_config(p, num_key_value_heads=3), "num_attention_heads is 8", "3"),
    "value heads do not divide": (
        lambda p: edit_config(p, linear_num_key_heads=3),
        "linear_num_value_heads is 4",
    ),
    "odd head size": (lambda p: edit_config(p, linear_key_head_dim=100), "linear_key_head_dim is 100", "32"),
    "more chosen than there are": (lambda p: edit_config(p, num_experts_per_tok=99), "99", "num_experts, 32"),
    "no tokenizer": (remove("tokenizer.json"), "has no tokenizer"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_checkpoint(broken, capsys, name):
    """Through the command's own entry point, in this process: the same path as `lily-mlx generate`."""
    breaks, *words = BREAKS[name]
    breaks(broken)
    before = sorted(broken.iterdir())
    check_in_process(capsys, ["--model", str(broken), "--prompt", "x", "--max-tokens", "2"], *words)
    assert sorted(broken.iterdir()) == before


def check_in_process(capsys, arguments, *words, command="generate"):
    hook.install()
    module = importlib.import_module(f"mlx_lm.{command}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [f"mlx_lm.{command}", "--engine", "lily", *arguments])
        with pytest.raises(SystemExit) as stopped:
            module.main()
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", ""], ["--prompt is empty"]),
        (["--max-tokens", "0"], ["--max-tokens is 0", "at least 1"]),
        (["--max-tokens", "-3"], ["--max-tokens is -3"]),
        (["--prefill-step-size", "0"], ["--prefill-step-size is 0"]),
        (["--quantized-kv-start", "-1"], ["--quantized-kv-start is -1", "at least 0"]),
    ],
    ids=str,
)
def test_bad_values(capsys, arguments, words):
    check_in_process(capsys, ["--model", str(TINY), *arguments], *words)


def test_unknown_backend(capsys, monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "vulkan")
    check_in_process(
        capsys, ["--model", str(TINY)], "LILY_BACKEND is 'vulkan'", "auto, metal, cuda, host, ops"
    )


def test_missing_backend(capsys, monkeypatch):
    import mlx.core as mx

    absent = "cuda" if not mx.cuda.is_available() else "metal"
    monkeypatch.setenv("LILY_BACKEND", absent)
    check_in_process(capsys, ["--model", str(TINY)], f"LILY_BACKEND is '{absent}'", "device here")


def test_missing_model(capsys):
    check_in_process(capsys, ["--model", "no/such-model"], "'no/such-model' is neither a folder nor")


def test_cache_prompt_writes_nothing(capsys, broken, tmp_path):
    cut_weights(broken)
    out = tmp_path / "cache.safetensors"
    arguments = ["--model", str(broken), "--prompt", "x", "--prompt-cache-file", str(out)]
    check_in_process(capsys, arguments, "cut short", command="cache_prompt")
    assert not out.exists()


def test_weights_that_do_not_fit_the_config(run_cli, broken):
    """Found only while loading, so it goes through the excepthook of a real command."""
    drop_a_tensor(broken)
    result = run_cli("mlx_lm.generate", "--engine", "lily", "--model", broken, "--prompt", "x")
    check(result, "cannot be loaded", "layers.0.mlp.gate.weight")


def test_explain_says_it_in_one_line_too(run_cli, broken):
    edit_config(broken, model_type="llama")
    check(run_cli("lily-mlx", "explain", "--model", broken), "'llama'", "qwen3_5, qwen3_5_moe")


def test_auto_falls_back_to_stock(run_cli, broken):
    edit_config(broken, linear_key_head_dim=100)
    result = run_cli("mlx_lm.generate", "--engine", "auto", "--model", broken, "--prompt", "x")
    assert "running stock MLX-LM" in result.stderr


@pytest.mark.parametrize(
    "command", [("lily-mlx", "generate"), ("mlx_lm.generate", "--engine", "lily")], ids=" ".join
)
def test_no_mlx_backend(run_cli, tmp_path, command):
    """Plain `pip install lily-mlx` on Linux brings mlx without libmlx.so, so that mlx.core does not load."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text(
        "raise ImportError('libmlx.so: cannot open shared object file')"
    )
    result = run_cli(*command, "--model", TINY, env={"PYTHONPATH": str(tmp_path)})
    check(result, "libmlx.so", "lily-mlx[cpu]", "lily-mlx[cuda13]")


def test_python_errors_are_value_errors(broken):
    import lily_mlx

    edit_config(broken, model_type="llama")
    with pytest.raises(ValueError, match="'llama'"):
        lily_mlx.load(broken)
