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
from typing import Any

COMMANDS = ("generate", "chat", "server", "benchmark", "perplexity", "evaluate", "cache_prompt")
"""The mlx_lm commands that run a model."""

_MODULES = frozenset(f"mlx_lm.{name}" for name in COMMANDS)
# `import mlx_lm` imports this module before anything of MLX: the last moment to say that MLX is not usable.
_FIRST_MODULE = "mlx_lm.convert"

default_engine = "mlx"
"""What ``--engine`` is when neither the flag nor ``MLX_LM_ENGINE`` says; ``lily-mlx`` sets it to ``lily``."""


def notice(name: str) -> None:
    """React to the coming import of a module of mlx_lm. Idempotent."""
    if name == _FIRST_MODULE and _asked_for_lily(sys.argv):
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
        spec = sys._getframe(1).f_globals.get("__spec__")
        if spec is None or spec.name not in _MODULES:
            return original(self, args, namespace)
        from . import commands

        commands.add_engine_argument(self, default_engine)
        parsed = original(self, args, namespace)
        commands.start(self, parsed, spec.name.rpartition(".")[2])
        return parsed

    parse_args.lily_wrapped = True  # type: ignore[attr-defined]
    ArgumentParser.parse_args = parse_args  # type: ignore[method-assign]


def _asked_for_lily(argv: list[str]) -> bool:
    """True if the command line of an mlx_lm command names Lily's engine, before any parser exists."""
    program = argv[0].rpartition("/")[2] if argv else ""
    words = " ".join(argv[1:]).replace("--engine=", "--engine ")
    return program.startswith("mlx_lm") and ("--engine lily" in words or "--engine auto" in words)
