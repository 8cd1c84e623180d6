"""The comparison itself: arms in turn on the same weights, the same prompts and the same caches.

The protocol, for every length and phase:

- batch 1, stock's own generation loop (``mlx_lm.generate.generate_step``, greedy, no server), wired memory as
  ``mlx_lm.generate`` sets it;
- warm-ups of every arm, discarded; the logits must agree with the first arm's;
- rounds in which every arm is measured once, in turn; odd rounds go through the arms backwards;
- prefill: from the call to the first token, tokens of the prompt over seconds;
- decode: a number of steps at that context, after a few that fill the loop's pipeline. The cache before it is
  made once a length and given to every arm: random keys, values and states of the shapes and types that the
  model itself leaves behind (``random``), or what the first arm's prefill of a prompt leaves (``prefill``).

Every measurement is one line, written at once: an interrupted run keeps its lines and can be resumed.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import shlex
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Protocol

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from lily_mlx.errors import UsageError

from . import arms as arms_module
from . import costs, gate, record
from .arms import Arm
from .files import write_text

SETTINGS_FILE = "run.json"
DEFAULT_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

_LEAD_STEPS = 4  # decode steps before the clock: they fill the pipeline and let the cache grow
_STATE_SIZE = 0.1  # standard deviation of a random recurrent state

_generate = importlib.import_module("mlx_lm.generate")  # the package's attribute of that name is a function


@dataclass(frozen=True)
class Settings:
    """What is measured; a resumed run must have the same.

    Attributes:
        model: a checkpoint, or ``random:`` and a config.
        arms: names in their order.
        phases: of :data:`record.PHASES`.
        lengths: tokens of a prompt, or of context before the first step.
        rounds: measurements of every arm at every length and phase.
        decode_tokens: steps of one decode measurement.
        prefill_step_size: tokens of a chunk.
        decode_cache: ``random`` or ``prefill``.
        prompt: a text file's name, or ``random``.
        seed: of prompts, caches and random weights.
    """

    model: str
    arms: list[str]
    phases: list[str]
    lengths: list[int]
    rounds: int
    decode_tokens: int
    prefill_step_size: int
    decode_cache: str
    prompt: str
    seed: int

    def command(self) -> str:
        """The command line that measures this."""
        kind, _, config = self.model.partition(":")
        source = ["--random-weights", config] if kind == "random" else ["--model", self.model]
        words = ["lily-mlx", "bench", *source, "--arms", ",".join(self.arms)]
        words += ["--phase", ",".join(self.phases), "--lengths", ",".join(map(str, self.lengths))]
        words += ["--rounds", str(self.rounds), "--decode-tokens", str(self.decode_tokens)]
        words += ["--prefill-step-size", str(self.prefill_step_size), "--decode-cache", self.decode_cache]
        words += ["--prompt-file", self.prompt] if self.prompt != "random" else []
        return shlex.join([*words, "--seed", str(self.seed), "--output", "DIR"])

    def work_units(self, phase: str, length: int) -> int:
        """Relative time of one measurement, for the estimate of what is left."""
        return length if phase == "prefill" else 20 * (self.decode_tokens + _LEAD_STEPS)


class Watcher(Protocol):
    """What a comparison tells while it runs."""

    def step(self, text: str, units: int) -> None:
        """A measurement, or a warm-up, is done."""

    def row(self, phase: str, length: int, medians: dict[str, float]) -> None:
        """All rounds of a phase and length are done; tokens a second by arm."""


class Output:
    """The folder of one comparison, which only one run at a time may write to.

    Raises:
        UsageError: it holds another comparison, one that was not to be resumed, or another run writes to it.
    """

    def __init__(self, folder: Path, settings: Settings, environment: record.Record, resume: bool) -> None:
        self.file = folder / record.FILE
        self.done: dict[tuple[str, int, int, str], float] = {}
        self.described = folder / SETTINGS_FILE
        software = {k: environment[k] for k in ("chip", "mlx", "mlx_lm", "lily_mlx", "commit")}
        self.wanted = {**asdict(settings), **software}
        self.resume = resume
        self.lock: IO[str] | None = None
        self._hold()
        if self.described.exists() and resume:
            self.run = _check_same(self.described, self.wanted)
            if self.file.exists():
                record.drop_partial_line(self.file)
                lines = record.read(self.file) if self.file.stat().st_size else ()
                self.done = {
                    (x["phase"], x["length"], x["round"], x["arm"]): x["tokens_per_second"] for x in lines
                }
            return
        self.run = uuid.uuid4().hex[:12]

    def begin(self) -> None:
        """Make the folder, with a description that a resumed run is held against.

        Raises:
            UsageError: it cannot be made, or another run was faster.
        """
        folder = self.described.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{folder} cannot be made: {error.strerror}") from None
        self._hold()
        self.close()  # the description is replaced, and with it what is locked
        write_text(self.described, json.dumps({"run": self.run, **self.wanted}, indent=2) + "\n")
        self._hold()

    def _hold(self) -> None:
        """Lock the folder's description, if there is one, until :meth:`close`."""
        folder = self.described.parent
        if self.lock is None and self.described.exists():
            try:
                lock = self.described.open(encoding="utf-8")
            except OSError as error:
                raise UsageError(f"{self.described} cannot be read: {error.strerror}") from None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another lily-mlx bench writes to {folder} now; wait for it or name another --output"
                ) from None
            except OSError:  # a file system without locks
                pass
            self.lock = lock
        if self.file.exists() and not self.resume:
            self.close()
            raise UsageError(f"{folder} holds measurements already; add --resume or name another --output")

    def close(self) -> None:
        """Let another run write to the folder."""
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    def add(self, line: record.Record) -> None:
        """Write a measurement."""
        record.append(self.file, line)
        self.done[line["phase"], line["length"], line["round"], line["arm"]] = line["tokens_per_second"]


def _check_same(described: Path, wanted: dict[str, Any]) -> str:
    try:
        before = json.loads(described.read_text(encoding="utf-8"))
        run = before.pop("run")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{described} is not what lily-mlx bench writes; name another --output") from None
    for name, value in wanted.items():
        if before.get(name) != value:
            raise UsageError(
                f"--resume: {name} is {value!r}, but {described.parent} was measured with "
                f"{before.get(name)!r}"
            )
    return str(run)


class Clock:
    """The time limit: whether another measurement may begin."""

    def __init__(self, limit: float | None) -> None:
        self.end = None if limit is None else time.monotonic() + limit

    def allows(self, seconds: float = 0.0) -> bool:
        """Whether ``seconds`` more would still be within the limit."""
        return self.end is None or time.monotonic() + seconds < self.end


def order(names: Sequence[str], round_: int) -> list[str]:
    """The arms of a round: forwards in even rounds, backwards in odd ones."""
    return list(names) if round_ % 2 == 0 else list(reversed(names))


@dataclass
class Comparison:
    """Everything that one run needs.

    Attributes:
        settings: what to measure.
        model: stock's, with its weights.
        output: where lines go.
        environment: facts for every line.
        prompt: tokens of a prompt of a length.
        trained: whether the weights are those of a trained model.
        gate_tokens: the prompt of the gate.
        clock: the time limit.
        cool_down: seconds to wait before every measurement.
        watcher: who is told.
    """

    settings: Settings
    model: nn.Module
    output: Output
    environment: record.Record
    prompt: Callable[[int], mx.array]
    trained: bool
    gate_tokens: mx.array
    clock: Clock
    cool_down: float
    watcher: Watcher

    def run(self) -> bool:
        """Measure what is not measured yet. False if the time limit ended it.

        Raises:
            gate.GateError: an arm does not compute what stock computes.
        """
        todo = list(self._todo())
        if not todo:
            return True
        with _generate.wired_limit(self.model, [_generate.generation_stream]):
            self.arms = arms_module.make(self.settings.arms, self.model)
            found = gate.check(self.model, self.arms, self.gate_tokens, self.trained)
            self.gates = {name: agreement.to_dict() for name, agreement in found.items()}
            self.peaks = costs.peaks()
            self.output.begin()
            return all(self._measure(phase, length) for phase, length in todo)

    def _todo(self) -> Iterator[tuple[str, int]]:
        for length in self.settings.lengths:
            for phase in self.settings.phases:
                wanted = {
                    (phase, length, r, a) for r in range(self.settings.rounds) for a in self.settings.arms
                }
                if wanted <= self.output.done.keys():
                    for _ in range(len(self.settings.arms) * (self.settings.rounds + 1)):
                        self.watcher.step("already measured", self.settings.work_units(phase, length))
                else:
                    yield phase, length

    def _measure(self, phase: str, length: int) -> bool:
        """All rounds of a phase and length; False once the time limit does not allow the next measurement."""
        s = self.settings
        for arm in self.arms:
            arm.prepare(min(s.prefill_step_size, max(length - 1, 1)), length)
        prompt = self.prompt(length)
        if phase == "prefill":
            measure: _Measure = _Prefill(prompt, s.prefill_step_size)
            work = costs.prefill(self.model, length, s.prefill_step_size)
        else:
            measure = _Decode(self._context(prompt), s.decode_tokens)
            work = costs.decode(self.model, length, s.decode_tokens)
        expected = self._warm_up(measure, phase, length)
        if expected is None:
            return False
        for round_ in range(s.rounds):
            for position, name in enumerate(order(s.arms, round_)):
                arm = next(arm for arm in self.arms if arm.name == name)
                if (phase, length, round_, name) not in self.output.done:
                    if not self.clock.allows(expected[name] + self.cool_down):
                        return False
                    time.sleep(self.cool_down)
                    seconds, peak = _timed(arm, measure.time)
                    line = self._line(
                        phase, length, arm, round_, position, measure.tokens, seconds, peak, work
                    )
                    self.output.add(line)
                self.watcher.step(
                    f"{phase} {length:,} round {round_ + 1} {name}", s.work_units(phase, length)
                )
        medians = {
            name: statistics.median(self.output.done[phase, length, r, name] for r in range(s.rounds))
            for name in s.arms
        }
        self.watcher.row(phase, length, medians)
        return True

    def _warm_up(self, measure: _Measure, phase: str, length: int) -> dict[str, float] | None:
        """Warm every arm and compare the logits. Returns the seconds of each last run, None if time is up."""
        seconds: dict[str, float] = {}
        first: mx.array | None = None
        for arm in self.arms:
            for _ in range(arm.warm_ups):
                if not self.clock.allows(max(seconds.values(), default=0.0)):
                    return None
                start = time.perf_counter()
                with arm.active():
                    logits = measure.logits(arm.model)
                mx.eval(logits)
                seconds[arm.name] = time.perf_counter() - start
            if first is None:
                first = logits
            gate.check_at_length(arm.name, phase, length, first, logits)
            self.watcher.step(
                f"{phase} {length:,} warm-up {arm.name}", self.settings.work_units(phase, length)
            )
        return seconds

    def _context(self, prompt: mx.array) -> list[Any]:
        """The cache that every arm's decode starts from."""
        with self.arms[0].active():
            model = self.arms[0].model
            if self.settings.decode_cache == "prefill":
                return prefilled_cache(model, prompt, self.settings.prefill_step_size)
            return random_cache(model, prompt.size, self.settings.seed)

    def _line(
        self,
        phase: str,
        length: int,
        arm: Arm,
        round_: int,
        position: int,
        tokens: int,
        seconds: float,
        peak: int,
        work: costs.Work,
    ) -> record.Record:
        return {
            "run": self.output.run,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "phase": phase,
            "length": length,
            "arm": arm.name,
            "round": round_,
            "order": position,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "peak_memory_bytes": peak,
            "switches": arm.switches(),
            "gate": self.gates[arm.name],
            "model": self.settings.model,
            "prefill_step_size": self.settings.prefill_step_size,
            "work": work.to_dict(),
            "command": self.settings.command(),
            **self.environment,
            **self.peaks,
        }


class _Measure(Protocol):
    tokens: int

    def logits(self, model: nn.Module) -> mx.array:
        """Run once, untimed; log-probabilities [vocabulary] of the first token."""

    def time(self, model: nn.Module) -> float:
        """Seconds of one measurement."""


class _Prefill:
    def __init__(self, prompt: mx.array, step: int) -> None:
        self.prompt, self.step, self.tokens = prompt, step, prompt.size

    def logits(self, model: nn.Module) -> mx.array:
        steps = _generate.generate_step(self.prompt, model, max_tokens=1, prefill_step_size=self.step)
        (_, logprobs), *_ = steps
        return logprobs

    def time(self, model: nn.Module) -> float:
        start = time.perf_counter()
        # No token beyond the first: with max_tokens=0 the loop ends when that one is there.
        for _ in _generate.generate_step(self.prompt, model, max_tokens=0, prefill_step_size=self.step):
            pass
        return time.perf_counter() - start


class _Decode:
    def __init__(self, context: list[Any], tokens: int) -> None:
        self.context, self.tokens = context, tokens

    def logits(self, model: nn.Module) -> mx.array:
        (_, logprobs), *_ = self._steps(model, _LEAD_STEPS + 2)
        return logprobs

    def time(self, model: nn.Module) -> float:
        steps = self._steps(model, _LEAD_STEPS + self.tokens)
        for _ in range(_LEAD_STEPS):
            next(steps)
        start = time.perf_counter()
        for _ in range(self.tokens):
            next(steps)
        seconds = time.perf_counter() - start
        steps.close()
        return seconds

    def _steps(self, model: nn.Module, count: int) -> Any:
        cache = copy_of(self.context)
        return _generate.generate_step(mx.array([0]), model, max_tokens=count, prompt_cache=cache)


def _timed(arm: Arm, measure: Callable[[nn.Module], float]) -> tuple[float, int]:
    """Seconds and peak memory of one measurement, from a clean start."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    with arm.active():
        seconds = measure(arm.model)
    mx.synchronize()
    return seconds, mx.get_peak_memory()


def copy_of(cache: Sequence[Any]) -> list[Any]:
    """New cache objects over the same arrays, so that a run does not change what the next one starts from."""
    copies = []
    for one in cache:
        if isinstance(one, KVCache):
            copy: Any = KVCache()
            # New handles: the cache assigns to parts of its arrays, which changes what a handle stands for.
            copy.keys, copy.values, copy.offset = one.keys[...], one.values[...], one.offset
        else:
            copy = ArraysCache(len(one.cache))
            copy.cache = list(one.cache)
        copies.append(copy)
    return copies


def random_cache(model: nn.Module, length: int, seed: int) -> list[Any]:
    """A cache as a prefill of ``length`` tokens leaves it in shape and type, filled with random numbers.

    Keys and values are standard normal, conv states too, recurrent states smaller.
    """
    rng = mx.random.key(seed)
    cache = make_prompt_cache(model)
    model(mx.array([[0]]), cache=cache)

    def normal(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        nonlocal rng
        rng, key = mx.random.split(rng)
        scale = _STATE_SIZE if dtype == mx.float32 else 1.0
        x = (scale * mx.random.normal(shape, key=key)).astype(dtype)
        mx.eval(x)
        return x

    for one in cache:
        if isinstance(one, KVCache):
            capacity = -(-length // one.step) * one.step  # as it grows itself
            one.keys, one.values = (
                normal((*x.shape[:2], capacity, x.shape[3]), x.dtype) for x in (one.keys, one.values)
            )
            one.offset = length
        else:
            one.cache = [normal(x.shape, x.dtype) for x in one.cache]
    return cache


def prefilled_cache(model: nn.Module, prompt: mx.array, step: int) -> list[Any]:
    """The cache after a prompt."""
    cache: list[Any] = make_prompt_cache(model)
    for start in range(0, prompt.size, step):
        model(prompt[None, start : start + step], cache=cache)
        mx.eval([one.state for one in cache])
    return cache


def random_prompt(vocabulary: int, seed: int) -> Callable[[int], mx.array]:
    """Prompts of random tokens, the same for the same seed and length."""
    return lambda length: mx.array(
        np.random.default_rng([seed, length]).integers(0, vocabulary, length, np.int32)
    )


def text_prompt(tokens: Sequence[int]) -> Callable[[int], mx.array]:
    """Prompts from a text's tokens, repeated where the text is too short."""
    return lambda length: mx.array(np.resize(np.array(tokens, np.int32), length))
