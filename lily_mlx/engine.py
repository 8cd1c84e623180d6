"""Lily's model classes in mlx-lm's place: load, register, unregister, convert.

mlx-lm looks a model class up by importing ``mlx_lm.models.<name>``, where ``MODEL_REMAPPING`` may rename the
model type first. :func:`register` uses exactly that: it puts Lily's modules into ``sys.modules`` under such
names and the names into ``MODEL_REMAPPING``.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import SUPPORTED_MODEL_TYPES, check_supported, check_tokenizer, read_checkpoint, resolve
from .errors import BackendUnavailableError, UnsupportedModelError, UsageError

if TYPE_CHECKING:
    import mlx.nn as nn

_PREFIX = "lily_"
_lock = threading.RLock()


def require_mlx() -> None:
    """Raise BackendUnavailableError unless MLX has a back-end that loads on this machine."""
    try:
        importlib.import_module("mlx.core")
    except ImportError as error:
        raise BackendUnavailableError(
            f"MLX does not load here ({str(error).splitlines()[0]}); on Linux install a back-end with Lily: "
            "pip install 'lily-mlx[cpu]', 'lily-mlx[cuda13]' or 'lily-mlx[cuda12]'"
        ) from None


def register() -> None:
    """Make ``mlx_lm.load`` return Lily's classes for the model types they support. Idempotent."""
    require_mlx()
    from mlx_lm import utils

    with _lock:
        for model_type in SUPPORTED_MODEL_TYPES:
            module = importlib.import_module(f"lily_mlx.models.{model_type}")
            sys.modules[f"mlx_lm.models.{_PREFIX}{model_type}"] = module
            utils.MODEL_REMAPPING[model_type] = _PREFIX + model_type


def unregister() -> None:
    """Undo :func:`register`: ``mlx_lm.load`` returns stock classes again. Idempotent."""
    require_mlx()
    from mlx_lm import utils

    with _lock:
        for model_type in SUPPORTED_MODEL_TYPES:
            if utils.MODEL_REMAPPING.get(model_type) == _PREFIX + model_type:
                del utils.MODEL_REMAPPING[model_type]
            sys.modules.pop(f"mlx_lm.models.{_PREFIX}{model_type}", None)


def is_registered() -> bool:
    """True between :func:`register` and :func:`unregister`."""
    from mlx_lm import utils

    return all(utils.MODEL_REMAPPING.get(name) == _PREFIX + name for name in SUPPORTED_MODEL_TYPES)


@contextlib.contextmanager
def _registered() -> Iterator[None]:
    with _lock:
        before = is_registered()
        register()
        try:
            yield
        finally:
            if not before:
                unregister()


def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load a checkpoint with Lily's model class; arguments and result are those of ``mlx_lm.load``.

    Args:
        path_or_hf_repo: a checkpoint folder or a Hugging Face repo.
        tokenizer_config: passed to the tokenizer.
        model_config: overrides keys of the config.
        adapter_path: LoRA adapters to apply.
        lazy: leave the weights unread until they are used.
        return_config: return the config as a third item.
        revision: a branch, tag or commit of the repo.
        trust_remote_code: let a checkpoint run its own code.

    Returns:
        ``(model, tokenizer)`` or ``(model, tokenizer, config)``.

    Raises:
        UnsupportedModelError: Lily has no class for the model type.
        UsageError: the checkpoint is missing, damaged or impossible.
        BackendUnavailableError: no MLX back-end is installed, or ``LILY_BACKEND`` names one that is not here.
    """
    require_mlx()
    import mlx_lm

    path = resolve(path_or_hf_repo, revision=revision)
    check(path)
    with _registered(), one_line_errors(path):
        return mlx_lm.load(
            str(path),
            tokenizer_config=tokenizer_config,
            model_config=model_config,
            adapter_path=adapter_path,
            lazy=lazy,
            return_config=return_config,
            trust_remote_code=trust_remote_code,
        )


def check(path: Path) -> None:
    """Raise unless Lily can run this checkpoint on this machine: back-end, config, weights, tokenizer.

    Raises:
        UsageError: with one line that says what is wrong.
    """
    from .launch import backend

    backend.resolve()
    read_checkpoint(path)
    check_tokenizer(path)


@contextlib.contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """Turn what stock raises for a checkpoint it cannot load into a UsageError of one line."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        shown = reason if len(reason) <= 300 else reason[:300] + " ..."
        raise UsageError(f"{path} cannot be loaded: {shown or type(error).__name__}") from error


def convert(model: nn.Module) -> nn.Module:
    """Turn a loaded stock model into Lily's, in place: same weights, same caches, Lily's classes.

    Args:
        model: an instance of stock's ``qwen3_5_moe.Model`` or ``qwen3_5.Model``; Lily's own is left alone.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: the model is of another class.
        UsageError: its sizes are impossible.
    """
    from .models import adopt, lily_class

    cls = lily_class(type(model))
    if cls is None:
        raise UnsupportedModelError(
            f"{type(model).__module__}.{type(model).__qualname__} has no Lily class; "
            f"supported model types: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    config = {"model_type": model.args.model_type, "text_config": model.args.text_config}
    check_supported(config, "the model")
    model.__class__ = cls
    adopt(model)
    return model
