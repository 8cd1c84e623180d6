"""Tables of measurements: medians, spread, paired ratios with their interval, memory and ablations.

A ratio is that of two arms' speeds in the same round of the same run, because what a machine does to one arm
(heat, other work) it does to its neighbour in time. Given is the geometric mean over rounds; the 95 %
interval is Student's t on the logarithms. Two rounds are the least for an interval.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from lily_mlx.errors import UsageError

from .ablations import ABLATIONS, Ablation
from .files import write_text
from .record import PHASES, Record

LILY, WITHOUT, CHUNKS = "lily", "lily-without-", "prompt_chunks"
BASELINES = ("stock", "stock+")

# The 97.5 % quantile of Student's t with 1, 2, ... 30 degrees of freedom; the last stands for more.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)

_SAME = ("chip", "backend", "model", "prefill_step_size", "os", "mlx", "mlx_lm", "lily_mlx", "commit", "nax")
"""Lines that differ in one of these are not compared."""

_BEGIN, _END = "<!-- lily-mlx bench compare -->", "<!-- end of lily-mlx bench compare -->"
_BEGIN_SUMMARY = "<!-- lily-mlx bench compare: summary -->"


@dataclass(frozen=True)
class Ratio:
    """A ratio of speeds: geometric mean and 95 % interval; the interval is None after one round."""

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.3f}x"
        return f"{self.mean:.3f}x ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Cell:
    """One arm at one length of one phase.

    Attributes:
        median, low, high: tokens a second; the slowest and the fastest round.
        rounds: how many.
        ratio: to the baseline in the same rounds; None for the baseline, or without a common round.
        of_limit: the least time that bandwidth and matrix peak allow over the median time.
        peak_memory: bytes, the most of any round.
        intensity, flops_per_second: its place in the roofline plot.
    """

    median: float
    low: float
    high: float
    rounds: int
    ratio: Ratio | None
    of_limit: float
    peak_memory: int
    intensity: float
    flops_per_second: float


@dataclass(frozen=True)
class Group:
    """Measurements that may be compared.

    Attributes:
        facts: what they have in common.
        commands: that measured them, in order.
        baseline: the arm that ratios refer to.
        arms: in their order of appearance.
        cells: by phase, length and arm.
        gains: what switching an op on gains, by phase, length and op; paired as ratios are.
        bandwidth, matrix_peak: the machine's limits, medians of what its processes measured.
    """

    facts: Record
    commands: list[str]
    baseline: str
    arms: list[str]
    cells: dict[tuple[str, int, str], Cell]
    gains: dict[tuple[str, int, str], Ratio]
    bandwidth: float
    matrix_peak: float

    def lengths(self, phase: str) -> list[int]:
        """Lengths measured in a phase, ascending."""
        return sorted({length for p, length, _ in self.cells if p == phase})


@dataclass(frozen=True)
class Table:
    """Text in columns, for the terminal and for Markdown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def groups(lines: Sequence[Record], baseline: str | None) -> list[Group]:
    """Sort measurements into groups and compute their figures.

    Runs with something switched off stay apart from the others: the more arms take turns, the slower each.

    Args:
        lines: as :func:`record.read` yields them.
        baseline: an arm, or None for stock, else stock+, else the first arm.

    Raises:
        UsageError: a measurement comes twice, or no line is of the baseline.
    """
    seen = set()
    ablating = {line["run"] for line in lines if line["arm"].startswith(WITHOUT)}
    by_key: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for line in lines:
        identity = tuple(line[k] for k in ("run", "phase", "length", "arm", "round"))
        if identity in seen:
            run, phase, length, arm, round_ = identity
            raise UsageError(
                f"run {run} has {arm}, {phase} {length}, round {round_} twice; name each file once"
            )
        seen.add(identity)
        by_key[*(line[k] for k in _SAME), line["run"] in ablating].append(line)
    return [_group(members, baseline) for members in by_key.values()]


def _group(lines: list[Record], baseline: str | None) -> Group:
    arms = list(dict.fromkeys(line["arm"] for line in sorted(lines, key=lambda x: (x["round"], x["order"]))))
    if baseline is None:
        baseline = next((arm for arm in BASELINES if arm in arms), arms[0])
    if baseline not in arms:
        raise UsageError(f"--baseline is {baseline!r}; the arms measured are {', '.join(arms)}")
    by_cell: dict[tuple[str, int, str], list[Record]] = defaultdict(list)
    for line in lines:
        by_cell[line["phase"], line["length"], line["arm"]].append(line)
    cells, gains = {}, {}
    for (phase, length, arm), members in by_cell.items():
        reference = by_cell.get((phase, length, baseline), [])
        ratio = paired_ratio(members, reference) if arm != baseline else None
        cells[phase, length, arm] = _cell(members, ratio)
        if arm.startswith(WITHOUT):
            gain = paired_ratio(by_cell.get((phase, length, LILY), []), members)
            if gain is not None:
                gains[phase, length, arm.removeprefix(WITHOUT)] = gain
    return Group(
        facts={name: lines[0][name] for name in (*_SAME, "cores", "memory_bytes", "python", "nax_why")},
        commands=list(dict.fromkeys(line["command"] for line in lines)),
        baseline=baseline,
        arms=arms,
        cells=cells,
        gains=gains,
        bandwidth=statistics.median(line["bandwidth"] for line in lines),
        matrix_peak=statistics.median(line["matrix_peak"] for line in lines),
    )


def _cell(lines: list[Record], ratio: Ratio | None) -> Cell:
    speeds = [line["tokens_per_second"] for line in lines]
    seconds = statistics.median(line["seconds"] for line in lines)
    flops, nbytes = lines[0]["work"]["flops"], lines[0]["work"]["bytes"]
    least = max(flops / lines[0]["matrix_peak"], nbytes / lines[0]["bandwidth"])
    return Cell(
        median=statistics.median(speeds),
        low=min(speeds),
        high=max(speeds),
        rounds=len(speeds),
        ratio=ratio,
        of_limit=least / seconds,
        peak_memory=max(line["peak_memory_bytes"] for line in lines),
        intensity=flops / nbytes,
        flops_per_second=flops / seconds,
    )


def paired_ratio(lines: Sequence[Record], reference: Sequence[Record]) -> Ratio | None:
    """The ratio of ``lines`` to ``reference`` over the rounds that both have; None if there is none."""
    speeds = {(line["run"], line["round"]): line["tokens_per_second"] for line in reference}
    logs = [
        math.log(line["tokens_per_second"] / speeds[key])
        for line in lines
        if (key := (line["run"], line["round"])) in speeds
    ]
    if not logs:
        return None
    mean = statistics.mean(logs)
    if len(logs) == 1:
        return Ratio(math.exp(mean), None, None)
    half = _T[min(len(logs) - 1, len(_T)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


# --- Tables -------------------------------------------------------------------------------------------------


def summary(group: Group, phase: str) -> Table:
    """Medians of every arm and their ratios to the baseline, a row a length."""
    others = [arm for arm in engines(group) if arm != group.baseline]
    columns = ["tokens", f"{group.baseline} tok/s"]
    for arm in others:
        columns += [f"{arm} tok/s", f"{arm} / {group.baseline} (95 %)"]
    rows = []
    for length in group.lengths(phase):
        row = [f"{length:,}", _speed(group.cells.get((phase, length, group.baseline)))]
        for arm in others:
            cell = group.cells.get((phase, length, arm))
            row += [_speed(cell), str(cell.ratio) if cell and cell.ratio else "-"]
        rows.append(row)
    return Table(f"{phase}: median tokens a second", columns, rows)


def details(group: Group, phase: str) -> Table:
    """Spread, share of the machine's limit and memory of every arm at every length."""
    rows = []
    for length in group.lengths(phase):
        for arm in group.arms:
            if cell := group.cells.get((phase, length, arm)):
                rows.append(
                    [
                        f"{length:,}",
                        arm,
                        _speed(cell),
                        f"{cell.low:,.1f} to {cell.high:,.1f}",
                        str(cell.rounds),
                        f"{cell.of_limit:.1%}",
                        _gigabytes(cell),
                    ]
                )
    columns = ["tokens", "arm", "tok/s", "slowest to fastest", "rounds", "of the limit", "peak GB"]
    return Table(f"{phase}: every arm", columns, rows)


def engines(group: Group) -> list[str]:
    """The arms with nothing switched off; all arms if there is none."""
    return [arm for arm in group.arms if not arm.startswith(WITHOUT)] or group.arms


def memory_arms(group: Group) -> list[str]:
    """The arms whose memory tells something: whole engines, and prompts without chunks."""
    whole = engines(group)
    return [arm for arm in group.arms if arm in whole or arm == WITHOUT + CHUNKS]


def memory(group: Group) -> Table | None:
    """Peak memory of a prefill, a row a length; None without a prefill."""
    if not group.lengths("prefill"):
        return None
    arms = memory_arms(group)
    rows = []
    for length in group.lengths("prefill"):
        cells = [group.cells.get(("prefill", length, arm)) for arm in arms]
        rows.append([f"{length:,}", *(_gigabytes(cell) for cell in cells)])
    return Table("prefill: peak memory in GB, weights included", ["tokens", *arms], rows)


def ablations(group: Group) -> Table | None:
    """What every mechanism gains where it was switched off and on; None if no arm switches one off."""
    if not group.gains:
        return None
    listed = {a.switch for a in ABLATIONS}
    unlisted = sorted({op for _, _, op in group.gains} - listed)
    rows = []
    for ablation in (*ABLATIONS, *(Ablation("-", "", PHASES[0], op) for op in unlisted)):
        measured = sorted((p, n) for p, n, op in group.gains if op == ablation.switch)
        rows += [_ablation_row(group, ablation, phase, length) for phase, length in measured]
        seen = {length for phase, length in measured if phase == ablation.phase}
        for length in [n for n in ablation.reference if n not in seen] or ([] if measured else [None]):
            rows.append(_ablation_row(group, ablation, ablation.phase, length))
    columns = [
        "",
        "mechanism",
        "switch",
        "phase",
        "tokens",
        "gain here (95 %)",
        "peak GB, without",
        "reference engine, M5 Max",
    ]
    return Table("ablations: speed with the mechanism over speed without it", columns, rows)


def _ablation_row(group: Group, ablation: Ablation, phase: str, length: int | None) -> list[str]:
    reference, gain, peaks = "-", None, "-"
    if phase == ablation.phase:
        percent = ablation.reference.get(length) if length is not None else None
        reference = f"{percent:+.1f} %" if percent is not None else ablation.reference_text or "-"
    if length is not None and ablation.switch:
        gain = group.gains.get((phase, length, ablation.switch))
    if gain and length is not None:
        arms = (LILY, f"{WITHOUT}{ablation.switch}")
        peaks = ", ".join(_gigabytes(group.cells[phase, length, arm]) for arm in arms)
    return [
        ablation.mechanism,
        ablation.text,
        ablation.switch or "-",
        phase,
        f"{length:,}" if length is not None else "-",
        as_percent(gain) if gain else not_measured(ablation),
        peaks,
        reference,
    ]


def not_measured(ablation: Ablation) -> str:
    """What stands in the place of a gain that nobody measured."""
    return "not measured" if ablation.switch else ablation.why_no_switch


def as_percent(gain: Ratio) -> str:
    """A ratio as a gain: 1.05 is +5.0 %."""
    text = f"{100 * (gain.mean - 1):+.1f} %"
    if gain.low is None or gain.high is None:
        return text
    return f"{text} ({100 * (gain.low - 1):+.1f} to {100 * (gain.high - 1):+.1f})"


def _speed(cell: Cell | None) -> str:
    return f"{cell.median:,.1f}" if cell else "-"


def _gigabytes(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    peak = cell.peak_memory / 1e9
    return f"{peak:.2f}" if peak >= 1 else f"{peak:.3g}"


def describe(facts: Mapping[str, object]) -> str:
    """A group's machine, model and versions in one line."""
    model = str(facts["model"])
    if not model.startswith("random:") and os.sep in model:
        model = Path(model).name
    matrix = {True: "in use", False: "not in use", None: "unknown"}[facts["nax"]]  # type: ignore[index]
    parts = [
        f"{facts['chip']} ({facts['backend']})",
        model,
        f"prefill step {facts['prefill_step_size']:,}",
        f"MLX {facts['mlx']}",
        f"mlx-lm {facts['mlx_lm']}",
        f"lily-mlx {facts['lily_mlx']} at {facts['commit'] or 'an unknown commit'}",
        f"{facts['os']}, Python {facts['python']}",
        f"Apple's neural accelerators {matrix} ({facts['nax_why']})",
    ]
    return "; ".join(parts)


def _tables(group: Group) -> tuple[list[Table], list[Table]]:
    """The tables everybody wants, and the ones for a closer look."""
    phases = [phase for phase in PHASES if group.lengths(phase)]
    first = [summary(group, phase) for phase in phases]
    first += [table for table in (memory(group), ablations(group)) if table]
    return first, [details(group, phase) for phase in phases]


def print_tables(groups: Sequence[Group], console: Console | None = None) -> None:
    """Print every group's tables."""
    console = console or Console()
    for group in groups:
        console.print(describe(group.facts), highlight=False, markup=False)
        first, closer = _tables(group)
        for table in first + closer:
            console.print(table.title, style="italic", highlight=False, markup=False)
            rich = RichTable()
            for name in table.columns:
                # In a narrow terminal a figure is folded and never cut.
                rich.add_column(
                    name, justify="right" if name not in _TEXT_COLUMNS else "left", overflow="fold"
                )
            for row in table.rows:
                rich.add_row(*row)
            console.print(rich)


_TEXT_COLUMNS = {"", "arm", "mechanism", "switch", "phase"}


def write_markdown(groups: Sequence[Group], file: Path, images: Mapping[int, Mapping[str, Path]]) -> None:
    """Write every group's tables and plots.

    Args:
        groups: what to write.
        file: if it exists it has the two marker comments, and only what lies between them is replaced; where
            the first says ``summary``, by each phase's table of medians and plot of speeds alone, of runs
            with nothing switched off.
        images: for the index of a group, the light variant of each plot by what it shows; the dark one lies
            beside it.

    Raises:
        UsageError: the file cannot be written.
    """
    before, begin, after = check_markdown(file)
    if begin == _BEGIN_SUMMARY:
        parts = [
            _summary_markdown(group, images.get(i, {}), file)
            for i, group in enumerate(groups)
            if not group.gains
        ]
    else:
        parts = [_markdown(group, images.get(i, {}), file) for i, group in enumerate(groups)]
    block = "\n".join(parts)
    write_text(file, f"{before}{begin}\n\n{block}\n{_END}\n{after}")


def check_markdown(file: Path) -> tuple[str, str, str]:
    """What comes before the first marker comment of a page, that comment, and what comes after the second.

    Raises:
        UsageError: the file exists and is not such a page.
    """
    if not file.exists():
        return "", _BEGIN, ""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"{file} cannot be read: {reason}") from None
    begin = _BEGIN_SUMMARY if _BEGIN_SUMMARY in text else _BEGIN
    before, opened, rest = text.partition(begin)
    _, closed, after = rest.partition(_END)
    if not (opened and closed):
        raise UsageError(
            f"{file} exists and has no lines {_BEGIN} and {_END} for the tables to go between; "
            "add them, or name a new file"
        )
    return before, begin, after.removeprefix("\n")


def _summary_markdown(group: Group, images: Mapping[str, Path], file: Path) -> str:
    tables = [summary(group, phase) for phase in PHASES if group.lengths(phase)]
    speeds = {title: light for title, light in images.items() if "throughput" in title}
    return "\n".join([f"{describe(group.facts)}.\n", *map(_markdown_table, tables), *_pictures(speeds, file)])


def _markdown(group: Group, images: Mapping[str, Path], file: Path) -> str:
    first, closer = _tables(group)
    what = ", with and without single mechanisms" if group.gains else ""
    parts = [f"**{group.facts['chip']}{what}.** {describe(group.facts)}.\n"]
    parts += [f"    {command}\n" for command in group.commands]
    parts += [_markdown_table(table) for table in first]
    parts += _pictures(images, file)
    parts.append("<details><summary>Spread, limits and memory</summary>\n")
    parts += [_markdown_table(table) for table in closer]
    parts.append("</details>\n")
    return "\n".join(parts)


def _pictures(images: Mapping[str, Path], file: Path) -> list[str]:
    """Links from ``file`` to plots, each in the reader's colours."""
    pictures = []
    for title, light in images.items():
        dark = light.with_name(light.name.replace("-light.", "-dark."))
        link, dark_link = (Path(os.path.relpath(p, file.parent)).as_posix() for p in (light, dark))
        pictures.append(
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark_link}">'
            f'<img alt="{title}" src="{link}" width="720"></picture>\n'
        )
    return pictures


def _markdown_table(table: Table) -> str:
    marks = ["---" if name in _TEXT_COLUMNS else "---:" for name in table.columns]
    rows = [table.columns, marks, *table.rows]
    return f"{table.title}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
