"""``lily-mlx explain``: which path every op of a model takes on this machine, and why.

Reads configs and safetensors headers only. The reasons come from the same ``supports`` functions that the
layers ask, so that what is shown is what runs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import checkpoint, engine
from .launch import backend
from .plan import OpPlan, plan
from .settings import BACKENDS, settings

_WHY = {
    (True, "metal"): "MLX finds a Metal device",
    (True, "cuda"): "MLX finds a CUDA device",
    (True, "ops"): "MLX finds no GPU here",
} | {(False, name): f"LILY_BACKEND asks for {name}" for name in BACKENDS}


@dataclass(frozen=True)
class Report:
    """What :func:`explain` found; every field is plain data.

    Attributes:
        model: path, type, size in bytes, shapes and quantisation of the checkpoint.
        device: what MLX runs on here.
        backend: what was asked for, what runs and why.
        versions: of lily-mlx, mlx, mlx-lm.
        ops: one plan an op and phase.
    """

    model: dict[str, Any]
    device: dict[str, Any]
    backend: dict[str, str]
    versions: dict[str, str]
    ops: tuple[OpPlan, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def print(self) -> None:
        """Print the report as tables for people."""
        from rich.console import Console
        from rich.table import Table

        console = Console(markup=False, emoji=False)  # a path may hold [bold] or :smile:
        facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        facts.add_column(style="bold")
        facts.add_column()
        for name, value in (
            ("model", self.model["path"]),
            ("type", f"{self.model['type']}, {_quantization_text(self.model['quantization'])}"),
            ("size", f"{self.model['bytes'] / 1e9:.3g} GB" if self.model["bytes"] else "not downloaded yet"),
            ("device", self.device["name"]),
            ("back-end", f"{self.backend['used']}: {self.backend['why']}"),
            ("versions", ", ".join(f"{name} {number}" for name, number in self.versions.items())),
        ):
            facts.add_row(name, value)
        console.print(facts)
        ops = Table(title="ops of one forward pass")
        for column in ("op", "layers", "phase", "path", "why"):
            ops.add_column(column, no_wrap=column != "why")
        for (op, layers, path, why), phases in self._phases_by_path().items():
            style = "green" if path != "stock" else ""
            ops.add_row(op, str(layers), " ".join(phases), path, why, style=style)
        console.print(ops)

    def _phases_by_path(self) -> dict[tuple[str, int, str, str], list[str]]:
        """Plans that differ only in the phase, together."""
        rows: dict[tuple[str, int, str, str], list[str]] = {}
        for op in self.ops:
            rows.setdefault((op.op, op.layers, op.path, op.why), []).append(op.phase)
        return rows


def explain(path_or_repo: str | Path) -> Report:
    """Plan a forward pass of a checkpoint on this machine, without loading it.

    Args:
        path_or_repo: a checkpoint folder or a Hugging Face repo, of which all but the weights is fetched.

    Raises:
        UsageError: the checkpoint is missing, damaged, impossible or of a type that Lily has no class for.
        BackendUnavailableError: no MLX back-end is installed, or the one asked for is not here.
    """
    engine.require_mlx()
    folder = checkpoint.resolve(path_or_repo, allow_patterns=["*.json"])
    engine.check_settings()
    found = checkpoint.read_checkpoint(folder, weights=folder == Path(path_or_repo))
    used = backend.resolve()
    text = found.text_config
    return Report(
        model={
            "path": str(path_or_repo),
            "type": found.model_type,
            "bytes": found.nbytes,
            "layers": text["num_hidden_layers"],
            "hidden_size": text["hidden_size"],
            "quantization": _quantization(found),
        },
        device=_device(),
        backend={"asked": settings().backend, "used": used, "why": _WHY[settings().backend == "auto", used]},
        versions={name: version(name) for name in ("lily-mlx", "mlx", "mlx-lm")},
        ops=tuple(plan(found, used)),
    )


def _quantization(found: checkpoint.Checkpoint) -> dict[str, Any] | None:
    quantization = found.config.get("quantization") or found.config.get("quantization_config")
    if not quantization:
        return None
    return {key: quantization[key] for key in ("mode", "bits", "group_size") if key in quantization}


def _quantization_text(quantization: dict[str, Any] | None) -> str:
    if quantization is None:
        return "not quantised"
    return (
        f"{quantization.get('mode', 'affine')} {quantization.get('bits', '?')} bits, "
        f"group {quantization.get('group_size', '?')}"
    )


def _device() -> dict[str, Any]:
    import mlx.core as mx

    device = mx.default_device()
    info = mx.device_info()
    name = info.get("device_name") or info.get("architecture") or "CPU"
    return {"name": f"{name} ({device})", "metal": mx.metal.is_available(), "info": dict(info)}
