"""Command lines of bench.ops: what cannot be is one line and status 2, before anything is measured."""

import sys

import pytest

from bench.ops import decode_state, gated_delta_scan, prefill

HOST = ["--backend", "host"]


@pytest.mark.parametrize(
    ("script", "words", "wrong"),
    [
        (gated_delta_scan, ["--tokens", "0"], "--tokens: '0' must be a whole number, at least 1"),
        (gated_delta_scan, ["--tokens", "x"], "--tokens: 'x' must be a whole number"),
        (gated_delta_scan, ["--heads", "3", "4"], "--heads is 3 4; the second must be a multiple"),
        (gated_delta_scan, ["--heads", "0", "4"], "--heads: '0' must be"),
        (gated_delta_scan, ["--size", "33"], "--size is 33; it must be a multiple of 32"),
        (gated_delta_scan, ["--samples", "1"], "--samples: '1' must be a whole number, at least 2"),
        (gated_delta_scan, ["--json", "no/such/folder.jsonl"], "whose folder does not exist"),
        (gated_delta_scan, ["--backend", "nope"], "invalid choice: 'nope'"),
        (gated_delta_scan, ["--budget", "nan"], "'nan' must be a number of seconds above 0"),
        (prefill, ["--shrink", "0"], "--shrink: invalid choice"),
        (prefill, ["--tokens", "-1"], "--tokens: '-1' must be a whole number"),
        (prefill, ["--budget", "-1"], "must be a number of seconds"),
        (prefill, ["--jobs", "nothing"], "is part of no job's name"),
        (decode_state, ["--contexts", "0"], "--contexts: '0' must be"),
        (decode_state, ["--calls", "0"], "--calls: '0' must be"),
    ],
)
def test_impossible_values(script, words, wrong, monkeypatch, capsys):
    monkeypatch.setattr(script, "copy_bandwidth", lambda *_, **__: 1e9)
    if script is prefill:
        monkeypatch.setattr(script, "matrix_peak", lambda *_: 1e12)
        monkeypatch.setattr(script, "Clock", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["script", *([] if "--backend" in words else HOST), *words])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 2
    assert wrong in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("script", [gated_delta_scan, prefill, decode_state])
@pytest.mark.parametrize(
    ("asked", "wrong"), [("ops", "no GPU back-end here"), ("foo", "LILY_BACKEND"), ("metal", "metal")]
)
def test_a_back_end_that_is_not_here(script, asked, wrong, monkeypatch, capsys):
    monkeypatch.setenv("LILY_BACKEND", asked)
    monkeypatch.setattr("lily_mlx.launch.backend.available", lambda name: name in ("ops", "host"))
    monkeypatch.setattr(sys, "argv", ["script"])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 2
    assert wrong in capsys.readouterr().err.splitlines()[-1]
