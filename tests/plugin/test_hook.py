"""The --engine flag: where it shows, what it accepts, what it costs, how it is switched off."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from lily_mlx import cli, hook

ROOT = Path(__file__).parents[2]

FORMS = [
    ("mlx_lm.generate",),
    ("mlx_lm", "generate"),
    ("python", "-m", "mlx_lm", "generate"),
    ("python", "-m", "mlx_lm.generate"),
    ("lily-mlx", "generate"),
    ("mlx_lm.chat",),
    ("mlx_lm", "server"),
    ("python", "-m", "mlx_lm", "benchmark"),
    ("mlx_lm.perplexity",),
    ("mlx_lm.cache_prompt",),
]


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_flag_shows_in_help(run_cli, form):
    result = run_cli(*form, "--help")
    assert result.returncode == 0, result.stderr
    assert "--engine {mlx,lily,auto}" in result.stdout


def test_flag_shows_in_help_of_evaluate(run_cli, tmp_path):
    # mlx_lm.evaluate needs the large lm_eval package before it can even print its help
    for name, text in {
        "__init__": "",
        "api/__init__": "",
        "api/model": "class LM: pass",
        "api/registry": "def register_model(*names):\n    return lambda cls: cls",
    }.items():
        path = tmp_path / "lm_eval" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    result = run_cli("mlx_lm.evaluate", "--help", env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0, result.stderr
    assert "--engine {mlx,lily,auto}" in result.stdout


def test_commands_that_run_no_model_stay_as_they_are(run_cli):
    result = run_cli("mlx_lm.convert", "--help")
    assert result.returncode == 0
    assert "--engine" not in result.stdout


def test_wrong_value_is_argparses_own_error(run_cli):
    result = run_cli("mlx_lm.generate", "--engine", "rose")
    assert result.returncode == 2
    assert "argument --engine: invalid choice: 'rose'" in result.stderr
    assert "Traceback" not in result.stderr


def test_environment_sets_the_default(run_cli):
    result = run_cli("mlx_lm.generate", "--help", env={"MLX_LM_ENGINE": "auto"})
    assert "default: auto" in " ".join(result.stdout.split())


def test_lily_mlx_is_lily_whatever_the_environment_says(capsys, monkeypatch):
    monkeypatch.setenv("MLX_LM_ENGINE", "mlx")
    monkeypatch.setattr("sys.argv", ["lily-mlx"])
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    assert "(default: lily)" in " ".join(capsys.readouterr().out.split())


def test_wrong_default_matters_only_where_it_is_used(run_in_process, monkeypatch):
    monkeypatch.setenv("MLX_LM_ENGINE", "rose")
    status, _, errors = run_in_process("generate", engine=None)
    assert status == 2
    assert errors == "mlx_lm.generate: error: MLX_LM_ENGINE is 'rose'; it must be one of mlx, lily, auto\n"
    assert run_in_process("generate", "--help", engine=None)[0] == 0
    status, _, errors = run_in_process("generate", "--max-tokens", "0")
    assert "--max-tokens is 0" in errors


def test_python_m_lily_mlx(run_cli):
    assert run_cli("python", "-m", "lily_mlx", "--version").stdout.startswith("lily-mlx ")


def test_hook_is_off_on_demand(run_cli):
    result = run_cli("mlx_lm.generate", "--help", env={"LILY_DISABLE_HOOK": "1"})
    assert result.returncode == 0
    assert "--engine" not in result.stdout
    # ... and lily-mlx does not need it
    result = run_cli("lily-mlx", "generate", "--help", env={"LILY_DISABLE_HOOK": "1"})
    assert "--engine {mlx,lily,auto}" in result.stdout


def test_start_up_imports_nothing_but_the_standard_library(run_cli):
    result = run_cli("python", "-c", "import sys; print(*sorted(sys.modules))")
    loaded = set(result.stdout.split())
    assert not {name for name in loaded if name.startswith(("lily", "mlx", "numpy", "rich", "argparse"))}


def test_start_up_costs_under_two_milliseconds(run_cli):
    def site_time(env):
        lines = run_cli("python", "-X", "importtime", "-c", "pass", env=env).stderr.splitlines()
        return min(int(line.split("|")[1]) for line in lines if line.split("|")[-1].strip() == "site")

    # in turns, so that a busy machine slows both
    pairs = [(site_time({}), site_time({"LILY_DISABLE_HOOK": "1"})) for _ in range(8)]
    with_hook, without = map(min, zip(*pairs, strict=True))
    assert with_hook - without < 2000  # microseconds


def test_other_programs_parsers_are_left_alone():
    code = (
        "import mlx_lm, argparse\n"
        "p = argparse.ArgumentParser(); a = p.parse_args([])\n"
        "assert '--engine' not in p.format_help() and not vars(a)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_install_is_idempotent():
    hook.install()
    from argparse import ArgumentParser

    first = ArgumentParser.parse_args
    hook.install()
    hook.notice("mlx_lm.generate")
    assert ArgumentParser.parse_args is first


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_installed_and_uninstalled(kind, tmp_path):
    """A wheel and an editable install bring the hook and the kernels; uninstalling takes the hook away."""
    env = tmp_path / "env"
    venv.create(env, with_pip=False, system_site_packages=False)
    python = env / "bin" / "python"
    site = next(env.glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    build = f"import hatchling.build as b; print(b.build_{kind}({str(tmp_path)!r}))"
    name = subprocess.check_output([sys.executable, "-c", build], cwd=ROOT, text=True).split()[-1]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", str(tmp_path / name)], check=True)
    try:
        assert (site / "lily_mlx.pth").exists()
        assert (site / "lily_mlx").exists() == (kind == "wheel")
        show = "import sys; print([getattr(f, '__name__', '') for f in sys.meta_path].count('LilyWatch'))"
        assert subprocess.check_output([python, "-c", show], text=True).strip() == "1"
        kernels = "import lily_mlx.launch.source as s; print(len(list(s.KERNELS.glob('*.metal'))))"
        assert int(subprocess.check_output([python, "-c", kernels], text=True)) > 0
    finally:
        subprocess.run([*pip, "uninstall", "-q", "-y", "lily-mlx"], check=True)
    assert not (site / "lily_mlx.pth").exists()
    assert subprocess.check_output([python, "-c", show], text=True).strip() == "0"
