"""Plots of measurements, each in a light and a dark variant with a background of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lily_mlx.errors import UsageError

from .ablations import ABLATIONS, Ablation
from .compare import LILY, Group, Ratio, as_percent, describe, engines, memory_arms, not_measured
from .record import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_THEMES = {
    "light": {
        "ink": "#1f2328",
        "faint": "#d1d9e0",
        "ground": "#ffffff",
        "colors": ("#57606a", "#0969da", "#bc4c00", "#1a7f37"),
    },
    "dark": {
        "ink": "#e6edf3",
        "faint": "#3d444d",
        "ground": "#0d1117",
        "colors": ("#9198a1", "#4493f8", "#f0883e", "#3fb950"),
    },
}
_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
_LILY_PLACE = 1


def draw(groups: Sequence[Group], folder: Path) -> dict[int, dict[str, Path]]:
    """Draw every plot of every group.

    Returns:
        For the index of a group, the light variant of each plot by what it shows.

    Raises:
        UsageError: matplotlib is not installed, or the folder cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise UsageError("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}") from None
    return {i: _draw_group(group, folder, _slug(groups, i)) for i, group in enumerate(groups)}


def _slug(groups: Sequence[Group], index: int) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", str(groups[index].facts["chip"]).lower()).strip("-")
    return slug if len(groups) == 1 else f"{slug}-{index + 1}"


def _draw_group(group: Group, folder: Path, slug: str) -> dict[str, Path]:
    images = {}
    for name, title, figure in _figures(group):
        for theme in _THEMES:
            path = folder / f"{slug}-{name}-{theme}.png"
            with _style(theme):
                drawn: Figure = figure()
                try:
                    drawn.savefig(path, dpi=160)
                except OSError as error:
                    raise UsageError(f"{path} cannot be written: {error.strerror}") from None
                _close(drawn)
        images[title] = folder / f"{slug}-{name}-light.png"
    return images


def _close(figure: Figure) -> None:
    from matplotlib import pyplot

    pyplot.close(figure)


def _figures(group: Group) -> Iterator[tuple[str, str, Any]]:
    """Name, description and drawing function of every plot that the measurements allow."""
    for phase in PHASES:
        if group.lengths(phase):
            yield phase, f"{phase} throughput against length", lambda phase=phase: _throughput(group, phase)
    if group.lengths("prefill"):
        yield "memory", "peak memory against prompt length", lambda: _memory(group)
    if group.gains:
        yield "ablations", "what each mechanism gains", lambda: _ablations(group)
    yield "roofline", "roofline", lambda: _roofline(group)


@contextmanager
def _style(theme: str) -> Iterator[None]:
    import matplotlib
    from cycler import cycler

    ink, faint, ground, colors = (_THEMES[theme][key] for key in ("ink", "faint", "ground", "colors"))
    settings: dict[str, Any] = {
        "figure.facecolor": ground,
        "axes.facecolor": ground,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": faint,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler(color=colors),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 10,
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
    }
    with matplotlib.rc_context(settings):  # type: ignore[arg-type]
        yield


def _title(figure: Figure, group: Group, text: str) -> None:
    facts = group.facts
    engine = f"MLX {facts['mlx']}, lily-mlx at {facts['commit'] or 'an unknown commit'}"
    about = f"{facts['chip']}, {_model(group)}, prefill step {facts['prefill_step_size']:,}, {engine}"
    figure.suptitle(f"{text}\n{about}", fontsize=9)


def _model(group: Group) -> str:
    return describe(group.facts).split("; ")[1]


def _styles(arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each arm; Lily's are the same in every plot."""
    others = [arm for arm in arms if arm != LILY]
    places = {arm: i if i < _LILY_PLACE else i + 1 for i, arm in enumerate(others)} | {LILY: _LILY_PLACE}
    return {arm: {"color": f"C{i}", "marker": _MARKERS[i % len(_MARKERS)]} for arm, i in places.items()}


def _throughput(group: Group, phase: str) -> Figure:
    """Speeds, and below them ratios to the baseline where there is an arm to compare."""
    from matplotlib import pyplot

    lengths = group.lengths(phase)
    arms = engines(group)
    styles = _styles(arms)
    compared = any((cell := group.cells.get((phase, n, arm))) and cell.ratio for n in lengths for arm in arms)
    if compared:
        figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7.2, 5.6), height_ratios=(3, 2))
    else:
        figure, above = pyplot.subplots(figsize=(7.2, 3.6))
        below = None
    all_means: list[float] = []
    for arm in arms:
        cells = [(n, group.cells[phase, n, arm]) for n in lengths if (phase, n, arm) in group.cells]
        at = [n for n, _ in cells]
        style = {"markersize": 5, **styles[arm]}
        above.plot(at, [c.median for _, c in cells], label=arm, **style)
        above.fill_between(
            at, [c.low for _, c in cells], [c.high for _, c in cells], alpha=0.2, color=style["color"]
        )
        ratios = [(n, c.ratio) for n, c in cells if c.ratio]
        if arm == group.baseline or not ratios or below is None:
            continue
        means = [r.mean for _, r in ratios]
        all_means += means
        low = [r.mean - (r.low if r.low is not None else r.mean) for _, r in ratios]
        high = [(r.high if r.high is not None else r.mean) - r.mean for _, r in ratios]
        below.errorbar([n for n, _ in ratios], means, yerr=(low, high), capsize=3, **style)
    above.set_ylabel("tokens a second")
    above.set_ylim(bottom=0)
    above.yaxis.set_major_formatter("{x:,g}")
    above.legend(ncols=min(len(arms), 4))
    if below is not None:
        below.axhline(1, linewidth=1, linestyle="--", color=_ink())
        low, high = below.get_ylim()  # an interval over few rounds may be too wide to draw
        below.set_ylim(max(low, 0), min(high, 2 * max(1.0, *all_means)))
        below.set_ylabel(f"ratio to {group.baseline}")
    lowest = above if below is None else below
    lowest.set_xlabel("prompt, tokens" if phase == "prefill" else "context, tokens")
    _length_axis(lowest, lengths)
    ratio = "; ratio with 95 % interval" if below is not None else ""
    _title(figure, group, f"{phase} throughput: median, slowest to fastest{ratio}")
    return figure


def _tokens(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


def _ink() -> Any:
    from matplotlib import rcParams

    return rcParams["text.color"]


def _length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_tokens(n) for n in lengths])
    axes.minorticks_off()
    if len(lengths) == 1:
        axes.set_xlim(lengths[0] / 2, lengths[0] * 2)


def _memory(group: Group) -> Figure:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.6))
    lengths = group.lengths("prefill")
    arms = memory_arms(group)
    styles = _styles(arms)
    for arm in arms:
        cells = [(n, group.cells["prefill", n, arm]) for n in lengths if ("prefill", n, arm) in group.cells]
        if cells:
            at, peaks = zip(*((n, cell.peak_memory / 1e9) for n, cell in cells), strict=True)
            axes.plot(at, peaks, label=arm, markersize=5, **styles[arm])
    axes.set_ylabel("peak memory, GB")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("prompt, tokens")
    axes.legend(fontsize=9)
    _length_axis(axes, lengths)
    _title(figure, group, "peak memory of a prefill, weights included")
    return figure


def _ablations(group: Group) -> Figure:
    """Bars on a logarithmic axis, where a gain of 2 %, or a loss, can be seen beside a gain of 1,500 %."""
    from matplotlib import pyplot

    bars = _bars(group)
    figure, axes = pyplot.subplots(figsize=(7.2, 1.5 + 0.36 * len(bars)))
    here: dict[str, Any] = {"color": "C1", "label": f"here, {group.facts['chip']} (95 % interval)"}
    theirs: dict[str, Any] = {
        "color": "none",
        "edgecolor": "C2",
        "hatch": "////",
        "label": "reference engine's own figure, M5 Max",
    }
    for row, (_, gain, reference, missing) in enumerate(bars):
        half = 0.2 if gain and reference is not None else 0.0
        theirs_end = 1 + reference / 100 if reference is not None else 1.0
        if gain:
            low, high = (gain.mean if x is None else x for x in (gain.low, gain.high))
            error = {"xerr": ((gain.mean - low,), (high - gain.mean,)), "ecolor": _ink(), "capsize": 2}
            axes.barh(row - half, gain.mean - 1, 0.36, left=1, **here, **error)
            axes.text(
                max(high, 1), row - half, f"  {as_percent(gain).split(' (')[0]}", va="center", fontsize=7
            )
            here.pop("label", None)
        else:
            axes.text(max(theirs_end, 1), row, f"  {missing}", va="center", fontsize=7, style="italic")
        if reference is not None:
            axes.barh(row + half, theirs_end - 1, 0.36, left=1, **theirs)
            theirs.pop("label", None)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}x")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.75), max(high, 2) * 2)  # room for the figures beside the bars
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars], fontsize=8)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.axvline(1, linewidth=1, color=_ink())
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("speed with it over speed without it")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    _title(figure, group, "what each mechanism gains")
    return figure


def _bars(group: Group) -> list[tuple[str, Ratio | None, float | None, str]]:
    """Label, gain here, the reference engine's gain in per cent, and what to say where nothing was measured.

    In the order of the mechanisms.
    """
    listed = {a.switch for a in ABLATIONS}
    others = [Ablation("", "", "", op) for op in sorted({op for _, _, op in group.gains} - listed)]
    bars: list[tuple[str, Ratio | None, float | None, str]] = []
    for a in (*ABLATIONS, *others):
        gains = {(phase, n): gain for (phase, n, op), gain in group.gains.items() if op == a.switch}
        name = f"{a.mechanism} {a.text or a.switch}".strip(" -")
        for phase, n in sorted({*gains, *((a.phase, n) for n in a.reference)}):
            reference = a.reference.get(n) if phase == a.phase else None
            label = f"{name}, {phase} {_tokens(n)}"
            bars.append((label, gains.get((phase, n)), reference, not_measured(a)))
        if not gains and not a.reference:
            bars.append((f"{name}, {a.phase}", None, None, not_measured(a)))
    return bars


def _roofline(group: Group) -> Figure:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.8))
    ridge = group.matrix_peak / group.bandwidth
    intensities = [cell.intensity for cell in group.cells.values()]
    left, right = min(*intensities, ridge) / 3, max(*intensities, ridge) * 3
    axes.plot(
        (left, ridge, right),
        (left * group.bandwidth, group.matrix_peak, group.matrix_peak),
        color=_ink(),
        label=f"measured limits: {group.bandwidth / 1e9:,.4g} GB/s, {group.matrix_peak / 1e12:,.3g} TFLOP/s",
    )
    arms = engines(group)
    for arm, style in _styles(arms).items():
        for phase in PHASES:
            cells = [group.cells[k] for k in sorted(group.cells) if k[0] == phase and k[2] == arm]
            if cells:
                axes.plot(
                    [c.intensity for c in cells],
                    [c.flops_per_second for c in cells],
                    linestyle="none",
                    markersize=6,
                    markerfacecolor=style["color"] if phase == "prefill" else "none",
                    **style,
                    label=f"{arm}, {phase}",
                )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("least work: FLOP per byte of memory traffic")
    axes.set_ylabel("FLOP a second")
    axes.legend(fontsize=9)
    _title(figure, group, "roofline: a point a length")
    return figure
