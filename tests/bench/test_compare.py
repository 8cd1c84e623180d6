"""lily-mlx bench compare: its figures against ones worked out by hand, its files, and bad lines."""

import io
import json
import math
import re

import mlx.core as mx
import pytest
from rich.console import Console

from bench import compare, plots, record
from bench.ablations import ABLATIONS
from lily_mlx import cli
from lily_mlx.errors import UsageError
from lily_mlx.launch import backend

LINE = {
    "run": "r1",
    "time": "2026-01-01T00:00:00+00:00",
    "phase": "prefill",
    "length": 512,
    "arm": "stock",
    "round": 0,
    "order": 0,
    "tokens": 512,
    "seconds": 1.0,
    "tokens_per_second": 512.0,
    "peak_memory_bytes": 20_000_000_000,
    "switches": {"engine": "mlx"},
    "gate": {"relative_error": 0.0, "kl": 0.0, "top1": 1.0},
    "model": "random:qwen3.6-35b-a3b",
    "prefill_step_size": 2048,
    "work": {"flops": 2_000_000_000, "bytes": 1_000_000_000},
    "command": "lily-mlx bench --random-weights qwen3.6-35b-a3b --output DIR",
    "device": "Device(gpu, 0)",
    "backend": "cuda",
    "chip": "A chip",
    "cores": {"cpu": 16, "gpu": None},
    "memory_bytes": 1 << 37,
    "os": "Linux",
    "python": "3.12.1",
    "mlx": "0.32.4",
    "mlx_lm": "0.32.2",
    "lily_mlx": "0.1.0",
    "commit": "0123456789ab",
    "nax": False,
    "nax_why": "no Apple GPU",
    "bandwidth": 4e9,
    "matrix_peak": 2e10,
}


def measured(arm, round_, seconds, **other):
    line = {**LINE, "arm": arm, "round": round_, "seconds": seconds, **other}
    return {**line, "tokens_per_second": line["tokens"] / seconds}


def three_rounds(**other):
    """stock takes 1, 1.25 and 2 s; lily in the same rounds 0.5, 0.5 and 1 s; without an op 0.8 s."""
    seconds = {
        "stock": (1.0, 1.25, 2.0),
        "lily": (0.5, 0.5, 1.0),
        "lily-without-gated_delta_scan": (0.8, 0.8, 0.8),
    }
    return [measured(arm, r, s, **other) for arm, times in seconds.items() for r, s in enumerate(times)]


def test_figures_by_hand():
    (group,) = compare.groups(three_rounds(), None)
    assert group.baseline == "stock"
    lily = group.cells["prefill", 512, "lily"]
    assert (lily.median, lily.low, lily.high, lily.rounds) == (1024, 512, 1024, 3)
    # Ratios 2, 2.5, 2. Mean of logs and 4.303 standard errors, Student's t at two degrees of freedom.
    logs = [math.log(2), math.log(2.5), math.log(2)]
    mean = sum(logs) / 3
    half = 4.303 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2) / math.sqrt(3)
    assert lily.ratio.mean == pytest.approx(10 ** (1 / 3))
    assert lily.ratio.low == pytest.approx(math.exp(mean - half))
    assert lily.ratio.high == pytest.approx(math.exp(mean + half))
    # 2 GFLOP at 20 GFLOP/s take 0.1 s, 1 GB at 4 GB/s 0.25 s: the longer is the limit of a median 0.5 s.
    assert lily.of_limit == pytest.approx(0.5)
    assert lily.intensity == 2
    assert lily.flops_per_second == 4e9
    assert group.cells["prefill", 512, "stock"].ratio is None
    gain = group.gains["prefill", 512, "gated_delta_scan"]
    assert gain.mean == pytest.approx((1.6 * 1.6 * 0.8) ** (1 / 3))
    assert compare.as_percent(compare.Ratio(1.05, 0.98, 1.125)) == "+5.0 % (-2.0 to +12.5)"


def test_one_round_has_no_interval():
    (group,) = compare.groups([measured("stock", 0, 2.0), measured("lily", 0, 1.0)], None)
    assert str(group.cells["prefill", 512, "lily"].ratio) == "2.000x"


def test_only_rounds_that_both_arms_have_are_paired():
    lines = [
        measured("stock", 0, 1.0),
        measured("stock", 1, 9.0),
        measured("lily", 0, 0.5),
        measured("lily", 2, 0.1),
    ]
    (group,) = compare.groups(lines, None)
    assert group.cells["prefill", 512, "lily"].ratio == compare.Ratio(2.0, None, None)


def test_other_runs_with_the_same_round_are_other_pairs():
    lines = [*three_rounds(run="a"), *(x | {"run": "b"} for x in three_rounds())]
    (group,) = compare.groups(lines, None)
    assert group.cells["prefill", 512, "lily"].rounds == 6


@pytest.mark.parametrize(
    ("arms", "baseline"),
    [(("lily", "stock+", "stock"), "stock"), (("lily", "stock+"), "stock+"), (("lily",), "lily")],
)
def test_the_baseline_unless_one_is_named(arms, baseline):
    lines = [measured(arm, 0, 1.0, order=i) for i, arm in enumerate(arms)]
    (group,) = compare.groups(lines, None)
    assert group.baseline == baseline
    (group,) = compare.groups(lines, "lily")
    assert group.baseline == "lily"
    with pytest.raises(UsageError, match="--baseline is 'other'; the arms measured are"):
        compare.groups(lines, "other")


@pytest.mark.parametrize("field", ["chip", "mlx", "commit", "model"])
def test_different_machines_and_versions_stay_apart(field):
    lines = [measured("stock", 0, 1.0), measured("lily", 0, 1.0, **{field: "another"})]
    assert len(compare.groups(lines, None)) == 2


def test_runs_with_something_switched_off_stay_apart():
    alone = [measured("stock", 0, 1.0, run="r2"), measured("lily", 0, 0.25, run="r2")]
    ablation, plain = compare.groups(three_rounds() + alone, None)
    assert ablation.gains
    assert not plain.gains
    assert plain.cells["prefill", 512, "lily"].median == 2048
    assert ablation.cells["prefill", 512, "lily"].median == 1024


def test_losing_lengths_stay_in_the_table():
    lines = [measured("stock", 0, 1.0), measured("lily", 0, 1.25), measured("stock", 0, 1.0, length=1024)]
    (group,) = compare.groups(lines, None)
    assert compare.summary(group, "prefill").rows == [
        ["512", "512.0", "409.6", "0.800x"],
        ["1,024", "512.0", "-", "-"],
    ]


def test_the_ablation_table_has_every_mechanism_and_the_reference_beside():
    (group,) = compare.groups(three_rounds(length=2048), None)
    rows = compare.ablations(group).rows
    assert {row[0] for row in rows} == {a.mechanism for a in ABLATIONS}
    (scan,) = [row for row in rows if row[0] == "P4"]
    assert scan[2:5] == ["gated_delta_scan", "prefill", "2,048"]
    assert scan[5].startswith("+27.0 % (")
    assert scan[6:] == ["20.00, 20.00", "+5.6 %"]
    assert ["not measured", "-", "+77.4 %"] in [row[5:] for row in rows]
    (overlap,) = [row for row in rows if row[0] == "D3"]
    assert overlap[2:6] == ["overlap", "decode", "-", "not measured"]
    (accelerators,) = [row for row in rows if row[0] == "P6"]
    assert accelerators[2:6] == ["-", "prefill", "-", "no switch; see the share of the limit"]
    assert [row[4] for row in rows if row[0] == "D7"] == ["32,768", "65,536", "131,072"]


def test_memory_of_engines_and_of_prompts_without_chunks():
    whole = "lily-without-prompt_chunks"
    lines = [
        measured("stock", 0, 1.0),
        measured("lily", 0, 0.5, peak_memory_bytes=21_000_000_000),
        measured(whole, 0, 0.5, peak_memory_bytes=25_500_000_000),
        measured("lily-without-qmv", 0, 0.5),
        measured("lily", 0, 0.5, length=1024),
        measured("lily", 0, 0.5, phase="decode"),
    ]
    (group,) = compare.groups(lines, "stock")
    table = compare.memory(group)
    assert table.columns == ["tokens", "stock", "lily", whole]
    assert table.rows == [["512", "20.00", "21.00", "25.50"], ["1,024", "-", "20.00", "-"]]
    (chunks,) = [row for row in compare.ablations(group).rows if row[0] == "P5"]
    assert chunks[6] == "21.00, 25.50"
    (group,) = compare.groups([measured("lily", 0, 0.5, phase="decode")], None)
    assert compare.memory(group) is None


def save(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_markdown_replaces_only_what_is_between_its_marks(tmp_path, capsys):
    file = save(tmp_path / "a.jsonl", three_rounds())
    target = tmp_path / "page.md"
    target.write_text(f"before\n{compare._BEGIN}\nold\n{compare._END}\nafter\n")
    for _ in range(2):
        assert cli.main(["bench", "compare", str(file), "--markdown", str(target)]) == 0
    text = target.read_text()
    assert text.startswith("before\n<!--")
    assert text.endswith("-->\nafter\n")
    assert "old" not in text
    assert text.count("| 512 | 409.6 | 1,024.0 | 2.154x (") == 1
    assert LINE["command"] in text
    assert "prefill: median" in capsys.readouterr().out


def test_a_page_may_ask_for_the_summary_alone(tmp_path):
    files = [
        save(tmp_path / f"{arm}.jsonl", [measured(arm, 0, 1.0, command=f"measure {arm}", run=arm)])
        for arm in ("stock", "lily")
    ]
    summary, full = tmp_path / "README.md", tmp_path / "page.md"
    summary.write_text(f"before\n{compare._BEGIN_SUMMARY}\n{compare._END}\nafter\n")
    for _ in range(2):
        assert cli.main(["bench", "compare", *map(str, files), "--markdown", str(summary), str(full)]) == 0
    text = summary.read_text()
    assert text.startswith(f"before\n{compare._BEGIN_SUMMARY}\n")
    assert text.endswith(f"{compare._END}\nafter\n")
    assert "| 512 | 512.0 | 512.0 | - |" in text
    assert "every arm" not in text
    assert "every arm" in full.read_text()
    assert "    measure stock\n\n    measure lily\n" in full.read_text()


def test_a_narrow_terminal_cuts_no_figure():
    console = Console(width=50, record=True, file=io.StringIO())
    compare.print_tables(compare.groups(three_rounds(), None), console)
    text = console.export_text()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert "prefill: peak memory in GB, weights included\n" in text


def test_memory_of_a_small_model_has_its_digits():
    line = measured("stock", 0, 1.0, peak_memory_bytes=18_252_140)
    assert compare.memory(compare.groups([line], None)[0]).rows == [["512", "0.0183"]]


def test_arms_that_all_lack_something_are_compared_too():
    pytest.importorskip("matplotlib")
    lines = [measured(f"lily-without-{op}", 0, s) for op, s in (("qmv", 1.0), ("qmm", 2.0))]
    group = compare.groups(lines, None)[0]
    assert compare.summary(group, "prefill").rows == [["512", "512.0", "256.0", "0.500x"]]
    above, below = plots._throughput(group, "prefill").axes
    assert len(above.lines) == 2
    assert below.get_ylabel() == "ratio to lily-without-qmv"


def test_a_plot_of_one_arm_has_no_ratios():
    pytest.importorskip("matplotlib")
    lily = compare.groups([x for x in three_rounds() if x["arm"] == "lily"], None)[0]
    both = compare.groups([x for x in three_rounds() if x["arm"] in ("stock", "lily")], None)[0]
    (alone,), (above, _) = (plots._throughput(group, "prefill").axes for group in (lily, both))
    assert alone.lines[0].get_color() == above.lines[1].get_color()
    assert alone.get_xlabel() == "prompt, tokens"


def test_a_loss_can_be_seen_beside_a_large_gain():
    pytest.importorskip("matplotlib")
    lines = [measured("lily", r, s) for r, s in enumerate((1.0, 1.0))]
    lines += [measured("lily-without-qmv", r, s, run="r1") for r, s in enumerate((16.0, 16.0))]
    lines += [measured("lily-without-qmm", r, s, run="r1") for r, s in enumerate((0.9, 0.9))]
    (axes,) = plots._ablations(compare.groups(lines, None)[0]).axes
    assert axes.get_xscale() == "log"
    ends = {round(bar.get_x() + bar.get_width(), 6) for bar in axes.patches}
    assert {16.0, 0.9} <= ends
    assert {"  +1500.0 %", "  -10.0 %"} <= {text.get_text() for text in axes.texts}
    assert axes.get_xlim()[0] < 0.9


def test_plots_in_light_and_dark(tmp_path):
    pytest.importorskip("matplotlib")
    lines = [*three_rounds(length=2048), *three_rounds(phase="decode", length=4096)]
    file, target = save(tmp_path / "a.jsonl", lines), tmp_path / "page.md"
    assert (
        cli.main(["bench", "compare", str(file), "--markdown", str(target), "--plots", str(tmp_path / "p")])
        == 0
    )
    names = {f"a-chip-{name}" for name in ("prefill", "decode", "memory", "ablations", "roofline")}
    drawn = {path.name for path in (tmp_path / "p").iterdir()}
    assert drawn == {f"{name}-{theme}.png" for name in names for theme in ("light", "dark")}
    linked = re.findall(r'(?:src|srcset)="([^"]+)"', target.read_text())
    assert {f"p/{name}" for name in drawn} == set(linked)
    for theme, ground in (("light", 1.0), ("dark", 0.1)):  # readable whatever the page is
        corner = pytest.importorskip("matplotlib.image").imread(
            tmp_path / "p" / f"a-chip-memory-{theme}.png"
        )[0, 0]
        assert corner[:3].max() == pytest.approx(ground, abs=0.05)
        assert corner[3] == 1


def test_plots_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    file = save(tmp_path / "a.jsonl", three_rounds())
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "compare", str(file), "--plots", str(tmp_path / "p")])
    assert stopped.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no measurement"),
        ("{nonsense\n", "bad.jsonl:1: not JSON"),
        ("[]\n", "bad.jsonl:1: a measurement is a JSON object"),
        (
            json.dumps(LINE) + "\n" + json.dumps({"arm": "x"}) + "\n",
            "bad.jsonl:2: the measurement has no 'run'",
        ),
        (json.dumps(LINE | {"seconds": "1"}) + "\n", "seconds is '1'; it must be a number"),
        (json.dumps(LINE | {"seconds": 0}) + "\n", "seconds is 0; it must be above 0"),
        (json.dumps(LINE | {"round": True}) + "\n", "round is True; it must be a whole number"),
        (json.dumps(LINE | {"tokens_per_second": math.nan}) + "\n", "tokens_per_second is nan"),
        (json.dumps(LINE | {"phase": "train"}) + "\n", "phase is 'train'"),
        (json.dumps(LINE | {"bandwidth": 0}) + "\n", "bandwidth is 0; it must be above 0"),
        (json.dumps(LINE | {"work": {}}) + "\n", "flops of the work is None"),
        (json.dumps(LINE | {"work": {"flops": 1, "bytes": 0}}) + "\n", "bytes of the work is 0"),
        (2 * (json.dumps(LINE) + "\n"), "round 0 twice"),
    ],
)
def test_bad_lines_are_named(text, said, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "compare", str(tmp_path / "bad.jsonl")])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_missing_files_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "compare", str(tmp_path)])
    assert stopped.value.code == 2
    assert f"{record.FILE} cannot be read: No such file" in capsys.readouterr().err


def test_a_half_written_last_line_is_left_out(tmp_path):
    file = save(tmp_path / "a.jsonl", three_rounds())
    with file.open("a") as opened:
        opened.write('{"run": "r')
    assert len(list(record.read(file))) == 9


def test_a_line_survives_writing_and_only_whole_lines_are_written(tmp_path):
    record.append(tmp_path / "a.jsonl", LINE)
    assert list(record.read(tmp_path / "a.jsonl")) == [LINE]
    with pytest.raises(UsageError, match="chip is 5; it must be text"):
        record.append(tmp_path / "a.jsonl", LINE | {"chip": 5})


@pytest.mark.parametrize(
    ("architecture", "macos", "wheel", "nax", "why"),
    [
        ("applegpu_g17s", "26.2", 26, True, "macOS 26.2"),
        ("applegpu_g17s", "26.1", 26, False, "older than 26.2"),
        ("applegpu_g17s", "26.3", 15, False, "built for macOS 15"),
        ("applegpu_g17s", "26.3", None, None, "does not say"),
        ("applegpu_g16s", "26.3", 26, False, "older than generation 17"),
        ("applegpu_g17p", "26.3", 26, False, "older than generation 18"),
        ("something", "26.3", 26, None, "not known"),
    ],
)
def test_whether_matrix_accelerators_are_in_use(architecture, macos, wheel, nax, why, monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda device: {"architecture": architecture})
    monkeypatch.setattr(backend.platform, "mac_ver", lambda: (macos, ("", "", ""), "arm64"))
    monkeypatch.setattr(backend, "_wheel_macos", lambda: wheel)
    found, reason = backend.neural_accelerators.__wrapped__()  # the answer is kept for a process
    assert found is nax
    assert why in reason
