"""What ``lily-mlx bench`` shows while it runs: a bar with the time left, and a row for all that is done."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from .ab import Settings


class Progress:
    """A :class:`ab.Watcher` on the terminal; without one, only the rows."""

    def __init__(self, settings: Settings, console: Console | None = None) -> None:
        self.console = console or Console()
        per_arm = settings.rounds + 1
        total = (
            per_arm
            * len(settings.arms)
            * sum(
                settings.work_units(phase, length) for phase in settings.phases for length in settings.lengths
            )
        )
        self.bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            # Over many measurements, because long lengths take far more time than short ones.
            TimeRemainingColumn(),
            console=self.console,
            speed_estimate_period=600,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("loading and checking", total=total)

    def step(self, text: str, units: int) -> None:
        """A measurement, or a warm-up, is done."""
        self.bar.update(self.task, description=text, advance=units)

    def row(self, phase: str, length: int, medians: dict[str, float]) -> None:
        """All rounds of a phase and length are done; tokens a second by arm."""
        speeds = "  ".join(f"{name} {speed:,.1f}" for name, speed in medians.items())
        self.console.print(f"{phase:>7} {length:>7,}: {speeds} tok/s", highlight=False)

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
