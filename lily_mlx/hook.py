"""The ``--engine`` flag of the mlx_lm commands.

mlx-lm has no plugin mechanism. So ``lily_mlx.pth``, which the interpreter reads when it starts, puts a finder
on ``sys.meta_path`` that never finds anything: it calls :func:`notice` with the name of each module of mlx_lm
that is about to be imported, and does nothing else. No import happens at start-up; the finder is an
expression in the ``.pth`` file because importing even this file would cost more than the start-up may.

When a command module appears, ``ArgumentParser.parse_args`` is wrapped, once. The wrapper acts only when an
mlx_lm command is the caller: it adds the flag, takes its value out of the result again and hands it to
:mod:`lily_mlx.commands`. This works alike for ``mlx_lm.generate``, ``mlx_lm generate`` and
``python -m mlx_lm generate``.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

COMMANDS = ("generate", "chat", "server", "benchmark", "perplexity", "evaluate", "cache_prompt")
"""The mlx_lm commands that run a model."""

_MODULES = frozenset(f"mlx_lm.{name}" for name in COMMANDS)
# `import mlx_lm` imports this module before anything of MLX: the last moment to say that MLX is not usable.
_FIRST_MODULE = "mlx_lm.convert"


def notice(name: str) -> None:
    """React to the coming import of a module of mlx_lm. Idempotent."""
    if name == _FIRST_MODULE and _asks_for_lily(sys.orig_argv):
        from . import commands

        commands.require_mlx()
    elif name in _MODULES:
        install()


def install() -> None:
    """Wrap ``ArgumentParser.parse_args`` for the mlx_lm commands. Idempotent."""
    original = ArgumentParser.parse_args
    if hasattr(original, "lily_wrapped"):
        return

    def parse_args(self: ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        module = sys._getframe(1).f_globals
        spec = module.get("__spec__")
        if spec is None or spec.name not in _MODULES:
            return original(self, args, namespace)
        from . import commands

        commands.add_engine_argument(self)
        parsed = original(self, args, namespace)
        commands.start(parsed, spec.name.rpartition(".")[2], module)
        return parsed

    parse_args.lily_wrapped = True  # type: ignore[attr-defined]
    ArgumentParser.parse_args = parse_args  # type: ignore[method-assign]


def _asks_for_lily(words: Sequence[str]) -> bool:
    """True if the words that started this process are an mlx_lm command's with another engine than stock.

    Asked before any parser exists. ``sys.argv`` would not do: it does not have the module's name yet when
    ``python -m`` imports the package.
    """
    if not any(word.rpartition("/")[2].partition(".")[0] == "mlx_lm" for word in words):
        return False
    from .settings import default_engine

    engine = default_engine()
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, separator, value = word.partition("=")
        if flag.startswith("--en") and "--engine".startswith(flag):  # argparse takes abbreviations
            engine = value if separator else following
    return engine in ("lily", "auto")
