"""Lily's model classes in mlx-lm's place: load, register, unregister, convert.

mlx-lm's ``load_model`` takes a function that gives the model class for a config; :func:`load` and the
``--engine`` flag pass :func:`classes`. For callers of ``mlx_lm.load``, :func:`register` uses stock's own
look-up, which imports ``mlx_lm.models.<name>``, where ``MODEL_REMAPPING`` may rename the model type first: it
puts Lily's modules into ``sys.modules`` under such names and the names into ``MODEL_REMAPPING``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import SUPPORTED_MODEL_TYPES, check_supported, check_tokenizer, read_checkpoint, resolve
from .errors import BackendUnavailableError, LilyError, UnsupportedModelError, UsageError, in_one_line
from .settings import OPS, settings

if TYPE_CHECKING:
    import mlx.nn as nn

if sys.platform != "darwin":
    # MLX's CUDA back-end ends a graph when the arrays of its kernels exceed this many MB, and reads the value
    # once. The default of 1,000 is two layers with all their experts: twenty graphs a token.
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "4000")

_PREFIX = "lily_"
_lock = threading.Lock()
_replaced: dict[str, str | None] = {}  # what MODEL_REMAPPING held before register()


def require_mlx() -> None:
    """Raise BackendUnavailableError unless MLX has a back-end that loads on this machine."""
    try:
        importlib.import_module("mlx.core")
    except ImportError as error:
        raise BackendUnavailableError(
            f"MLX does not load here ({in_one_line(error)}); on Linux MLX needs a back-end: "
            "pip install 'mlx[cpu]', 'mlx[cuda13]' or 'mlx[cuda12]'"
        ) from None


def register() -> None:
    """Make ``mlx_lm.load`` return Lily's classes for the model types they support. Idempotent."""
    require_mlx()
    from mlx_lm import utils

    with _lock:
        for model_type in SUPPORTED_MODEL_TYPES:
            name = _PREFIX + model_type
            sys.modules[f"mlx_lm.models.{name}"] = importlib.import_module(f"lily_mlx.models.{model_type}")
            if utils.MODEL_REMAPPING.get(model_type) != name:
                _replaced[model_type] = utils.MODEL_REMAPPING.get(model_type)
                utils.MODEL_REMAPPING[model_type] = name


def unregister() -> None:
    """Undo :func:`register`: ``mlx_lm.load`` returns stock classes again. Idempotent."""
    require_mlx()
    from mlx_lm import utils

    with _lock:
        for model_type in SUPPORTED_MODEL_TYPES:
            name = _PREFIX + model_type
            before = _replaced.pop(model_type, None)
            if utils.MODEL_REMAPPING.get(model_type) == name:
                if before is None:
                    del utils.MODEL_REMAPPING[model_type]
                else:
                    utils.MODEL_REMAPPING[model_type] = before
            sys.modules.pop(f"mlx_lm.models.{name}", None)


def classes(config: Mapping[str, Any]) -> tuple[type[nn.Module], type]:
    """Lily's model class and its arguments' class for a config: ``get_model_classes`` of stock's load_model.

    Raises:
        UsageError: see :func:`lily_mlx.checkpoint.check_supported`.
    """
    check_supported(config, "the model")
    module = importlib.import_module(f"lily_mlx.models.{config['model_type']}")
    return module.Model, module.ModelArgs


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
        UnsupportedModelError: Lily has no class for the model type, or a size is beyond Lily's limits.
        UsageError: the checkpoint is missing, damaged or impossible.
        BackendUnavailableError: no MLX back-end is installed, or ``LILY_BACKEND`` names one that is not here.
    """
    require_mlx()
    from mlx_lm import utils

    path = resolve(path_or_hf_repo, revision=revision)
    check(path)
    with one_line_errors(path):
        model, config = utils.load_model(
            path,
            lazy,
            model_config=model_config,
            get_model_classes=classes,
            trust_remote_code=trust_remote_code,
        )
        if adapter_path is not None:
            model = utils.load_adapters(model, adapter_path)
            model.eval()
        tokenizer = utils.load_tokenizer(path, tokenizer_config, eos_token_ids=config.get("eos_token_id"))
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def check(path: Path, *, weights: bool = True) -> None:
    """Raise unless Lily can run this checkpoint on this machine: settings, config, weights, tokenizer.

    Args:
        path: the checkpoint's folder.
        weights: whether weights and tokenizer must be there already.

    Raises:
        UsageError: with one line that says what is wrong.
    """
    check_settings()
    read_checkpoint(path, weights=weights)
    if weights:
        check_tokenizer(path)


def check_settings() -> None:
    """Raise unless this machine has the back-end that is asked for, and ``LILY_DISABLE`` names only ops.

    Raises:
        BackendUnavailableError: ``LILY_BACKEND`` names a back-end that is not here, or ``host`` where no C++
            compiler is.
        UsageError: a variable has a value that means nothing.
    """
    from .launch import backend
    from .launch.hostrt.compiler import find_compiler

    if backend.resolve() == "host":
        find_compiler()
    if unknown := sorted(settings().disabled_ops.difference(OPS)):
        raise UsageError(
            f"LILY_DISABLE names {', '.join(unknown)}; the ops that have a kernel are {', '.join(OPS)}"
        )


@contextlib.contextmanager
def one_line_errors(what: Path | str) -> Iterator[None]:
    """Turn what stock raises when ``what`` cannot be loaded into a UsageError of one line."""
    try:
        yield
    except LilyError:
        raise
    except Exception as error:  # a damaged checkpoint makes stock raise almost anything
        raise UsageError(f"{what} cannot be loaded: {in_one_line(error)}") from error


def convert(model: nn.Module) -> nn.Module:
    """Turn a loaded stock model into Lily's, in place: same weights, same caches, Lily's classes.

    Args:
        model: an instance of stock's ``qwen3_5_moe.Model`` or ``qwen3_5.Model``; Lily's own is left alone.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: the model is of another class, or a size is beyond Lily's limits.
        UsageError: its sizes are impossible.
        BackendUnavailableError: no MLX back-end is installed.
    """
    require_mlx()
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
