"""Bad input ends with exit status 2 and one line that names the value and what would be right."""

import io
import json
import os
import shutil
import struct

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils

import lily_mlx
from lily_mlx import checkpoint
from lily_mlx.counters import counts
from lily_mlx.errors import UsageError
from lily_mlx.explain import explain
from lily_mlx.launch.hostrt import compiler
from tests.conftest import TINY
from tests.plugin.test_cases import small_moe

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHORT = ("--prompt", "x", "--max-tokens", "2", "--verbose", "F")


@pytest.fixture
def broken(tmp_path):
    """A copy of the tiny checkpoint to break."""
    path = tmp_path / "model"
    shutil.copytree(TINY, path)
    return path


ABSENT = object()


def edit_config(path, **changes):
    """Change keys of the nested config; ABSENT deletes one."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    for key, value in changes.items():
        part = config["text_config"] if key in config["text_config"] and key != "model_type" else config
        if value is ABSENT:
            del part[key]
        else:
            part[key] = value
    file.write_text(json.dumps(config))


def edit(**changes):
    return lambda path: edit_config(path, **changes)


def rope(**changes):
    whole = {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    return edit(rope_parameters=whole | changes)


def check(result, *words):
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    check_line(result.stderr, *words)


def check_line(text, *words):
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1, text
    for word in words:
        assert word in lines[0]


def cut_weights(path):
    file = path / WEIGHTS
    file.write_bytes(file.read_bytes()[:1_000_000])


def damage_header(path):
    file = path / WEIGHTS
    file.write_bytes(struct.pack("<Q", 1 << 40) + file.read_bytes()[8:])


def remove(*names):
    return lambda path: [(path / name).unlink() for name in names]


def write(name, text):
    return lambda path: (path / name).write_text(text)


def write_index(*files):
    return write(INDEX, json.dumps({"weight_map": {str(i): file for i, file in enumerate(files)}}))


def instead(name, make):
    """Break by putting something else in the place of a file."""

    def breaks(path):
        (path / name).unlink()
        make(path / name)

    return breaks


def link_to_itself(path):
    path.symlink_to(path.name)


def drop_a_tensor(path):
    weights = mx.load(str(path / WEIGHTS))
    del weights["language_model.model.layers.0.mlp.gate.weight"]
    mx.save_safetensors(str(path / WEIGHTS), weights)


BREAKS = {
    "no weights": (remove(WEIGHTS), "lacks model.safetensors, which its"),
    "no weights, no index": (remove(WEIGHTS, INDEX), "no model*.safetensors"),
    "cut weights": (cut_weights, "damaged or cut short"),
    "damaged header": (damage_header, "damaged or cut short"),
    "weights are a folder": (instead(WEIGHTS, os.mkdir), "model.safetensors is a folder; it must be a file"),
    "weights are a pipe": (instead(WEIGHTS, os.mkfifo), "model.safetensors is not a regular file"),
    "weights are a broken link": (instead(WEIGHTS, link_to_itself), "model.safetensors is a link to nowhere"),
    "many shards missing": (
        write_index(*(f"model-{i}.safetensors" for i in range(9))),
        "lacks model-0.safetensors, model-1.safetensors, model-2.safetensors and 6 more, which its",
    ),
    "new line in a shard's name": (write_index("a\nb"), "lacks a b, which its"),
    "index of numbers": (write_index(5, "x"), "is not a safetensors index; it must have a weight_map"),
    "index is a folder": (instead(INDEX, os.mkdir), "index.json is a folder; it must be a file"),
    "index nested too deep": (write(INDEX, "[" * 100_000), "index.json is not JSON"),
    "no config": (remove("config.json"), "config.json is missing"),
    "config is not JSON": (write("config.json", "{"), "is not JSON"),
    "config is a list": (write("config.json", "[]"), "must be a JSON object"),
    "config is a folder": (instead("config.json", os.mkdir), "config.json is a folder; it must be a file"),
    "config links to itself": (instead("config.json", link_to_itself), "config.json is a link to nowhere"),
    "config nested too deep": (write("config.json", "[" * 100_000), "config.json is not JSON"),
    "number too long": (write("config.json", f"[{'9' * 5000}]"), "is not JSON: Exceeds the limit"),
    "no model type": (edit(model_type=ABSENT), "has no model_type"),
    "other model type": (edit(model_type="llama"), "'llama'", "qwen3_5, qwen3_5_moe"),
    "a class of its own": (edit(model_file="evil.py"), "'evil.py'", "Lily runs only its own"),
    "missing keys": (edit(hidden_size=ABSENT, num_experts=ABSENT), "lacks hidden_size, num_experts"),
    "zero size": (edit(hidden_size=0), "hidden_size is 0", "positive integer"),
    "text for a size": (edit(vocab_size="many"), "vocab_size is 'many'"),
    "size beyond int32": (edit(hidden_size=2**31), "hidden_size is 2147483648; it cannot exceed 2147483647"),
    "null for an optional size": (edit(full_attention_interval=None), "full_attention_interval is None"),
    "null for the kernel": (edit(linear_conv_kernel_dim=None), "linear_conv_kernel_dim is None"),
    "no full attention": (edit(full_attention_interval=9), "full_attention_interval is 9", "layers, 8"),
    "heads do not divide": (edit(num_key_value_heads=3), "num_attention_heads is 8", "3"),
    "value heads do not divide": (edit(linear_num_key_heads=3), "linear_num_value_heads is 4"),
    "odd head size": (edit(linear_key_head_dim=100), "linear_key_head_dim is 100", "32"),
    "more chosen than there are": (edit(num_experts_per_tok=99), "99", "num_experts, 32"),
    "more layers than weights": (edit(num_hidden_layers=9), "num_hidden_layers is 9", "have 8 layers"),
    "fewer layers than weights": (edit(num_hidden_layers=4), "num_hidden_layers is 4", "have 8 layers"),
    "other vocabulary": (edit(vocab_size=10), "vocab_size is 10", "embed_tokens.weight has shape [4096, 32]"),
    "other experts": (edit(num_experts=64), "num_experts is 64", "layers.0.mlp.gate.weight"),
    "other kernel": (edit(linear_conv_kernel_dim=1), "linear_conv_kernel_dim is 1", "[1024, 4, 1]"),
    "epsilon is text": (edit(rms_norm_eps="x"), "rms_norm_eps is 'x'; it must be a positive number"),
    "rope is text": (edit(rope_parameters="x"), "rope_parameters is 'x'; it must be a JSON object"),
    "theta is text": (rope(rope_theta="x"), "rope_theta is 'x'; it must be a positive number"),
    "negative rotary factor": (rope(partial_rotary_factor=-3), "partial_rotary_factor is -3"),
    "rotary factor above one": (
        rope(partial_rotary_factor=2),
        "partial_rotary_factor is 2; it cannot exceed 1",
    ),
    "odd rotary size": (rope(partial_rotary_factor=0.02), "of head_dim 256 is 5; it must be an even number"),
    "quantization is text": (edit(quantization="x"), "quantization is 'x'; it must be a JSON object"),
    "quantization without bits": (edit(quantization={"group_size": 64}), "quantization lacks bits"),
    "quantization by no method": (edit(quantization=None), "quantization_config lacks quant_method"),
}
TOKENIZER_BREAKS = {
    "no tokenizer": (remove("tokenizer.json"), "has no tokenizer"),
    "tokenizer is a folder": (instead("tokenizer.json", os.mkdir), "has no tokenizer"),
    "empty tokenizer": (write("tokenizer.json", "{}"), "the tokenizer of", "cannot be loaded"),
    "generation config is a list": (write("generation_config.json", "[]"), "cannot be loaded: 'list' object"),
}


@pytest.mark.parametrize("name", BREAKS | TOKENIZER_BREAKS)
def test_broken_checkpoint(run_in_process, broken, name):
    breaks, *words = (BREAKS | TOKENIZER_BREAKS)[name]
    breaks(broken)
    before = sorted(broken.iterdir())
    status, _, errors = run_in_process("generate", "--model", broken, *SHORT)
    assert status == 2
    check_line(errors, *words)
    assert sorted(broken.iterdir()) == before
    if name in BREAKS:  # explain needs no tokenizer
        with pytest.raises(UsageError) as error:
            explain(broken)
        for word in words:
            assert word in " ".join(str(error.value).splitlines())


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("generate", ["--prompt", ""], ["--prompt is empty"]),
        ("generate", ["--max-tokens", "0"], ["--max-tokens is 0", "at least 1"]),
        ("generate", ["--max-tokens", "-3"], ["--max-tokens is -3"]),
        ("generate", ["--prefill-step-size", "0"], ["--prefill-step-size is 0"]),
        ("generate", ["--quantized-kv-start", "-1"], ["--quantized-kv-start is -1", "at least 0"]),
        ("generate", ["--num-draft-tokens", "-1"], ["--num-draft-tokens is -1", "at least 0"]),
        ("generate", ["--kv-bits", "7"], ["--kv-bits is 7", "one of 1, 2, 3, 4, 5, 6, 8"]),
        ("generate", ["--kv-group-size", "33"], ["--kv-group-size is 33", "one of 32, 64, 128"]),
        ("generate", ["--seed", "-1"], ["--seed is -1"]),
        ("server", ["--decode-concurrency", "0"], ["--decode-concurrency is 0", "at least 1"]),
        ("server", ["--prompt-concurrency", "-1"], ["--prompt-concurrency is -1", "at least 1"]),
        ("server", ["--prompt-cache-size", "-1"], ["--prompt-cache-size is -1", "at least 0"]),
        ("generate", ["--adapter-path", "/nope"], ["the adapter /nope cannot be loaded"]),
        ("generate", ["--draft-model", "/nope"], ["'/nope' is neither a folder nor"]),
    ],
    ids=str,
)
def test_bad_values(run_in_process, command, arguments, words):
    status, _, errors = run_in_process(command, "--model", TINY, *arguments)
    assert status == 2
    check_line(errors, *words)


def test_kv_bits_are_those_of_mlx():
    """A value that is refused must be one that MLX refuses, and the other way round."""
    from lily_mlx.commands import _CHOICES

    def works(bits, group_size):
        try:
            mx.quantize(mx.zeros((1, 256)), group_size, bits)
        except ValueError:
            return False
        return True

    assert tuple(bits for bits in range(12) if works(bits, 64)) == _CHOICES["kv_bits"]
    assert tuple(size for size in (8, 16, 32, 64, 128, 256) if works(4, size)) == _CHOICES["kv_group_size"]


def test_all_samples_are_asked_for_by_minus_one(run_in_process, monkeypatch):
    def load_data(*args, num_samples, **kwargs):
        raise SystemExit(f"{num_samples} samples")

    monkeypatch.setattr("mlx_lm.perplexity.load_data", load_data)
    assert run_in_process("perplexity", "--model", TINY, "--num-samples", -1)[0] == "-1 samples"


def test_prompt_from_standard_input(run_in_process, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    status, _, errors = run_in_process("generate", "--model", TINY, "--prompt", "-")
    assert status == 2
    check_line(errors, "standard input is empty")
    monkeypatch.setattr("sys.stdin", io.StringIO("x"))
    words = ("--model", TINY, "--max-tokens", 1, "--verbose", "F")
    read = run_in_process("generate", *words, "--prompt", "-")
    assert read == run_in_process("generate", *words, "--prompt", "x")
    assert read[0] == 0


def test_unknown_backend(run_in_process, monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "vulkan")
    status, _, errors = run_in_process("generate", "--model", TINY)
    assert status == 2
    check_line(errors, "LILY_BACKEND is 'vulkan'", "auto, metal, cuda, host, ops")


def test_missing_backend(run_in_process, monkeypatch):
    absent = "cuda" if not mx.cuda.is_available() else "metal"
    monkeypatch.setenv("LILY_BACKEND", absent)
    status, _, errors = run_in_process("server")  # found before any model is asked for
    assert status == 2
    check_line(errors, f"LILY_BACKEND is '{absent}'", "device here")


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(compiler.shutil, "which", lambda *args, **kwargs: None)
    compiler.find_compiler.cache_clear()
    yield
    compiler.find_compiler.cache_clear()


@pytest.mark.usefixtures("without_compiler")
def test_host_without_a_compiler(run_in_process, monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "host")
    status, _, errors = run_in_process("generate", "--model", TINY)
    assert status == 2
    check_line(errors, "no C++ compiler is here", "LILY_BACKEND=host", "pip install ziglang")
    with pytest.raises(UsageError, match=r"no C\+\+ compiler is here"):
        explain(TINY)
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert {op.path for op in explain(TINY).ops} == {"stock"}


def test_disabling_an_unknown_op(run_in_process, monkeypatch):
    monkeypatch.setenv("LILY_DISABLE", "gated_delta_scan,scan")
    status, _, errors = run_in_process("generate", "--model", TINY)
    assert status == 2
    check_line(errors, "LILY_DISABLE names scan;", "gated_delta_scan")
    with pytest.raises(UsageError, match="LILY_DISABLE names scan;"):
        explain(TINY)


def test_cache_folder_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LILY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(UsageError, match=r"file/cache/host \(Not a directory\); set LILY_CACHE_DIR"):
        compiler._cached("key", ".so", lambda folder, target: target.touch())


@pytest.mark.parametrize("model", ["no/such-model", "~/model", "a" * 5000])
def test_missing_model(run_in_process, monkeypatch, broken, model):
    monkeypatch.setenv("HOME", str(broken.parent))  # ~ is for the shell: stock does not know it either
    status, _, errors = run_in_process("generate", "--model", model)
    assert status == 2
    check_line(errors, f"'{model}' is neither a folder nor")


def test_prompt_cache_of_a_model_that_has_gone(run_in_process, tmp_path):
    from mlx_lm.models.cache import KVCache, save_prompt_cache

    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 1, 8)), mx.zeros((1, 1, 1, 8)))
    file = tmp_path / "cache.safetensors"
    save_prompt_cache(str(file), [cache], {"model": "/gone/away", "tokenizer_config": "{}"})
    status, _, errors = run_in_process("generate", "--prompt-cache-file", file, *SHORT)
    assert status == 2
    check_line(errors, "'/gone/away' is neither a folder nor")


def test_cache_prompt_writes_nothing(run_in_process, broken, tmp_path):
    cut_weights(broken)
    out = tmp_path / "cache.safetensors"
    status, _, errors = run_in_process(
        "cache_prompt", "--model", broken, "--prompt", "x", "--prompt-cache-file", out
    )
    assert status == 2
    check_line(errors, "cut short")
    assert not out.exists()


def test_weights_that_do_not_fit_the_config(run_cli, broken):
    """Found only while loading: by the excepthook of a real command, and in the server's own thread."""
    drop_a_tensor(broken)
    words = ("cannot be loaded", "layers.0.mlp.gate.weight")
    check(run_cli("mlx_lm.generate", "--engine", "lily", "--model", broken, "--prompt", "x"), *words)
    result = run_cli("mlx_lm.server", "--engine", "lily", "--model", broken, "--port", 0, timeout=60)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    check_line(result.stderr[result.stderr.index("mlx_lm.server: error") :], *words)


def test_explain_says_it_in_one_line_too(run_cli, broken):
    edit_config(broken, model_type="llama")
    check(run_cli("lily-mlx", "explain", "--model", broken), "'llama'", "qwen3_5, qwen3_5_moe")


@pytest.mark.parametrize("example", ["chat.py", "generate.py"])
def test_an_example_without_its_checkpoint(run_cli, example):
    result = run_cli("python", TINY.parent / example, "no/such-model")
    check(result, f"{example}: error: ", "cannot be loaded" if example == "chat.py" else "'no/such-model'")


def test_explain_shows_a_path_as_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path / "[bold]x[0]:smile:"
    path.symlink_to(TINY)
    explain(path).print()
    assert f"{path} " in capsys.readouterr().out


def test_explain_of_a_repo_that_is_half_there(broken, monkeypatch):
    """Of a repo nothing but the configs is fetched; a download may have stopped half-way before."""
    write_index(WEIGHTS, "model-2.safetensors")(broken)
    monkeypatch.setattr(checkpoint, "resolve", lambda *args, **kwargs: broken)
    report = explain("somebody/something")
    assert report.model["bytes"] == 0
    with pytest.raises(UsageError, match=r"lacks model-2\.safetensors"):
        explain(broken)


@pytest.mark.parametrize(
    "arguments", ["explain --json --model", "generate --max-tokens 2 --prompt x --model"]
)
def test_closed_output(run_cli, arguments):
    """As in `lily-mlx explain ... | true`: whoever reads has gone before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = run_cli("lily-mlx", *arguments.split(), TINY, stdout=writer)
    finally:
        os.close(writer)
    assert result.returncode == 1
    assert result.stderr == ""


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_auto_stops_at_a_broken_checkpoint(run_in_process, broken, command):
    edit_config(broken, num_hidden_layers=9)
    status, _, errors = run_in_process(command, "--model", broken, engine="auto")
    assert status == 2
    check_line(errors, "num_hidden_layers is 9")


def test_auto_runs_stock_beyond_a_limit_of_lilys(run_in_process, tmp_path):
    """Head size 48 is no multiple of a simdgroup, and nothing is wrong with it for stock."""
    from mlx_lm.models import qwen3_5_moe

    config = small_moe(linear_key_head_dim=48, vocab_size=4096)
    model = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(config))
    mx.save_safetensors(str(tmp_path / WEIGHTS), dict(tree_flatten(model.parameters())))
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path)
    counts.clear()
    status, _, errors = run_in_process("generate", "--model", tmp_path, *SHORT, engine="auto")
    assert status == 0
    check_line(errors, "linear_key_head_dim is 48", "running stock MLX-LM")
    assert not counts
    status, _, errors = run_in_process("generate", "--model", tmp_path, *SHORT)
    assert status == 2
    check_line(errors, "linear_key_head_dim is 48")


def test_auto_runs_lily_for_the_models_of_later_requests(run_in_process, broken, monkeypatch):
    monkeypatch.setattr("mlx_lm.server.run", lambda *args, **kwargs: None)
    edit_config(broken, model_type="llama")
    assert run_in_process("server", "--model", broken, engine="auto")[0] == 0
    model, _ = utils.load(str(TINY), lazy=True)
    assert type(model).__module__ == "lily_mlx.models.qwen3_5_moe"


NO_BACKEND = {
    "lily-mlx generate": {},
    "lily-mlx explain --model x": {},
    "lily-mlx kernels check": {},
    "mlx_lm.generate --engine lily": {},
    "mlx_lm generate --eng=lily": {},
    "python -m mlx_lm generate --engine lily": {},
    "python -m mlx_lm.generate --engine auto": {},
    "mlx_lm.generate --max-tokens 2": {"MLX_LM_ENGINE": "lily"},
}


@pytest.mark.parametrize("command", NO_BACKEND)
def test_no_mlx_backend(run_cli, without_backend, command):
    result = run_cli(*command.split(), env=without_backend | NO_BACKEND[command])
    check(result, "libmlx.so", "'mlx[cpu]'", "'mlx[cuda13]'")


def test_no_mlx_backend_in_python(run_cli, without_backend):
    result = run_cli("python", "-c", "import lily_mlx; lily_mlx.convert(None)", env=without_backend)
    assert "BackendUnavailableError: MLX does not load here (libmlx.so" in result.stderr
    # ... and whoever does not ask for Lily gets Python's own error
    result = run_cli("mlx_lm.generate", "--engine", "mlx", env=without_backend)
    assert "mlx[cpu]" not in result.stderr
    assert "ImportError: libmlx.so" in result.stderr


@pytest.fixture
def without_backend(tmp_path):
    """Plain `pip install lily-mlx` on Linux brings mlx without libmlx.so, so that mlx.core does not load."""
    (tmp_path / "mlx").mkdir()
    text = "raise ImportError('libmlx.so: cannot open shared object file')"
    (tmp_path / "mlx" / "core.py").write_text(text)
    return {"PYTHONPATH": str(tmp_path)}


def test_python_errors_are_value_errors(broken):
    edit_config(broken, model_type="llama")
    with pytest.raises(ValueError, match="'llama'"):
        lily_mlx.load(broken)
