"""Self-checks: what passes is used and remembered, what fails falls back with one line."""

from pathlib import Path

import pytest

from lily_mlx import tiles
from lily_mlx.launch import backend as backends
from lily_mlx.launch import source
from lily_mlx.ops import choice, trust
from lily_mlx.ops import gated_delta_scan as scan

OP = "gated_delta_scan"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Let this machine look as if it had Metal, with a cache folder of its own."""
    monkeypatch.setenv("LILY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(backends, "available", lambda name: True)
    monkeypatch.setattr(backends, "chip", lambda name: "metal-test")
    monkeypatch.setattr(trust, "_checks", dict(trust._checks))
    trust.distrust.cache_clear()
    with backends.override("metal"):
        yield
    trust.distrust.cache_clear()


def test_what_passes_is_run_once_and_remembered(gpu, tmp_path):
    runs = []
    trust.self_check(OP)(lambda backend: runs.append(backend))
    assert choice.why_off(OP) is None
    assert choice.why_off(OP) is None
    trust.distrust.cache_clear()  # as in the next process
    assert choice.why_off(OP) is None
    assert runs == ["metal"]
    assert [path.name for path in tmp_path.iterdir()] == ["self-checks.json"]


@pytest.mark.parametrize("how", ["wrong", "raises"])
def test_what_fails_falls_back_and_says_so_once(gpu, capsys, how):
    def check(backend):
        if how == "raises":
            raise RuntimeError("program_source:3: error: no matching function\nand more lines")
        return "y is 1.0e+00 off the reference, allowed 7.8e-03"

    trust.self_check(OP)(check)
    reason = choice.why_off(OP)
    assert choice.why_off(OP) == reason
    assert "self-check" in reason
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "gated_delta_scan" in lines[0]
    assert ("no matching function" if how == "raises" else "off the reference") in lines[0]


def test_what_was_checked_with_other_tiles_or_another_release_is_checked_again(gpu, monkeypatch, tmp_path):
    runs = []
    trust.self_check(OP)(lambda backend: runs.append(backend))
    for path in Path(tiles.__file__).parent.glob("*.toml"):
        (tmp_path / path.name).write_text(path.read_text())

    def ask() -> int:
        trust.distrust.cache_clear()
        assert choice.why_off(OP) is None
        return len(runs)

    assert ask() == ask() == 1
    monkeypatch.setattr(tiles, "__file__", str(tmp_path / "__init__.py"))
    assert ask() == 1
    with (tmp_path / "gated_delta_scan.toml").open("a") as table:
        table.write("\n# another tile\n")
    assert ask() == ask() == 2
    monkeypatch.setattr(trust, "__version__", "0.0.1")
    assert ask() == ask() == 3


def test_damaged_memory_is_no_memory(gpu, tmp_path):
    (tmp_path / "self-checks.json").write_text("{not json")
    trust.self_check(OP)(lambda backend: None)
    assert choice.why_off(OP) is None


@pytest.mark.parametrize("backend", [name for name in source.BACKENDS if backends.available(name)])
def test_the_scans_own_check_passes(backend):
    assert scan._self_check(backend) is None


def test_the_scans_own_check_can_fail(monkeypatch):
    wrong = lambda *operands, **options: [2 * x for x in scan.gated_delta_scan_reference(*operands)]  # noqa: E731
    monkeypatch.setattr(scan, "gated_delta_scan", wrong)
    assert "off the reference" in scan._self_check("host")
