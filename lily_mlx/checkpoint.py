"""Reading a checkpoint's config and safetensors headers, and saying in one line what is wrong with them.

Nothing here loads weights or needs MLX, so that a 20 GB checkpoint is checked in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UnsupportedModelError, UsageError

SUPPORTED_MODEL_TYPES = ("qwen3_5", "qwen3_5_moe")

_HEAD_SIZE_MULTIPLE = 32  # a simdgroup's 32 lanes share one head

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "linear_num_value_heads",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
_MOE_SIZES = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_OPTIONAL_SIZES = ("head_dim", "full_attention_interval", "linear_conv_kernel_dim")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, from its safetensors header.

    Attributes:
        dtype: safetensors' name of the type, such as ``BF16`` or ``U32``.
        shape: its shape.
        file: the safetensors file that holds it.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's description, without its weights.

    Attributes:
        path: the folder.
        config: ``config.json`` as it is.
        tensors: every tensor by name.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def text_config(self) -> dict[str, Any]:
        """The text model's part of the config; of a flat config, the config."""
        return text_config(self.config)

    @property
    def nbytes(self) -> int:
        """Bytes of all safetensors files."""
        return sum((self.path / name).stat().st_size for name in {t.file for t in self.tensors.values()})


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's part of a nested or flat config."""
    return dict(config.get("text_config", config))


def read_config(path: Path) -> dict[str, Any]:
    """Read ``config.json`` of a checkpoint folder.

    Raises:
        UsageError: the folder or the file is missing, or is not a JSON object with ``model_type``.
    """
    if not path.is_dir():
        raise UsageError(
            f"model {str(path)!r} is not a folder; give a checkpoint folder or a Hugging Face repo"
        )
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{file} is missing; a checkpoint folder has a config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{file} holds {type(config).__name__}; it must be a JSON object")
    if not isinstance(config.get("model_type"), str):
        raise UsageError(f"{file} has no model_type; it must be one of {', '.join(SUPPORTED_MODEL_TYPES)}")
    return config


def check_supported(config: Mapping[str, Any], where: Path | str) -> None:
    """Raise unless Lily has a class for this config and its sizes are possible.

    Args:
        config: a checkpoint's config, nested or flat.
        where: what to call it in the message.

    Raises:
        UnsupportedModelError: the model type has no Lily class.
        UsageError: a needed key is missing, or a size is impossible.
    """
    if config["model_type"] not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModelError(
            f"{where} has model type {config['model_type']!r}, for which Lily has no class; "
            f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise UsageError(f"{where}: text_config is {text!r}; it must be a JSON object")
    moe = config["model_type"] == "qwen3_5_moe" or bool(text.get("num_experts"))
    needed = _SIZES + (_MOE_SIZES if moe else ("intermediate_size",))
    if missing := [key for key in needed if key not in text]:
        raise UsageError(f"{where}: the config lacks {', '.join(missing)}")
    for key in (*needed, *(key for key in _OPTIONAL_SIZES if text.get(key) is not None)):
        if not isinstance(text[key], int) or isinstance(text[key], bool) or text[key] <= 0:
            raise UsageError(f"{where}: {key} is {text[key]!r}; it must be a positive integer")
    _check_sizes(text, where, moe)


def _check_sizes(text: Mapping[str, Any], where: Path | str, moe: bool) -> None:
    if text.get("head_dim") is None and text["hidden_size"] % text["num_attention_heads"]:
        raise UsageError(
            f"{where}: hidden_size {text['hidden_size']} is not a multiple of num_attention_heads "
            f"{text['num_attention_heads']}, and there is no head_dim"
        )
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if text[many] % text[few]:
            raise UsageError(f"{where}: {many} is {text[many]}; it must be a multiple of {few}, {text[few]}")
    head_sizes = {
        "head_dim": text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        "linear_key_head_dim": text["linear_key_head_dim"],
        "linear_value_head_dim": text["linear_value_head_dim"],
    }
    for key, value in head_sizes.items():
        if value % _HEAD_SIZE_MULTIPLE:
            raise UsageError(
                f"{where}: {key} is {value}; a head size must be a multiple of {_HEAD_SIZE_MULTIPLE}"
            )
    if moe and text["num_experts_per_tok"] > text["num_experts"]:
        raise UsageError(
            f"{where}: num_experts_per_tok is {text['num_experts_per_tok']}; "
            f"it cannot exceed num_experts, {text['num_experts']}"
        )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the headers of every ``model*.safetensors`` in a checkpoint folder.

    Raises:
        UsageError: there is none, one that the index names is missing, or one is damaged or cut short.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(path.glob("model*.safetensors"))
    present = {file.name for file in files}
    if absent := sorted(_indexed_files(path) - present):
        raise UsageError(f"{path} lacks {', '.join(absent)}, which its model.safetensors.index.json names")
    if not files:
        raise UsageError(f"{path} has no model*.safetensors; a checkpoint folder holds its weights there")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 - safe_open is not iterable
                    part = opened.get_slice(name)
                    tensors[name] = Tensor(part.get_dtype(), tuple(part.get_shape()), file.name)
        except (SafetensorError, OSError) as error:
            raise UsageError(
                f"{file} is damaged or cut short: {_first_line(error)}; download it again"
            ) from None
    return tensors


def _indexed_files(path: Path) -> set[str]:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return set()
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{index} is not a safetensors index; it must have a weight_map") from None


def read_checkpoint(path: Path, *, weights: bool = True) -> Checkpoint:
    """Read and check a checkpoint that Lily is to run: config, sizes, safetensors headers.

    Args:
        path: its folder.
        weights: whether the weights must be there; if not, and they are not, ``tensors`` is empty.

    Raises:
        UsageError: see :func:`read_config`, :func:`check_supported` and :func:`read_tensors`.
    """
    config = read_config(path)
    check_supported(config, path)
    present = weights or any(path.glob("model*.safetensors"))
    return Checkpoint(path, config, read_tensors(path) if present else {})


def check_tokenizer(path: Path) -> None:
    """Raise UsageError unless the folder holds a tokenizer."""
    if not any((path / name).exists() for name in _TOKENIZER_FILES):
        raise UsageError(f"{path} has no tokenizer; it must hold one of {', '.join(_TOKENIZER_FILES)}")


def resolve(
    path_or_repo: str | Path, *, allow_patterns: list[str] | None = None, revision: str | None = None
) -> Path:
    """The local folder of a checkpoint: the path itself, or the snapshot of a Hugging Face repo.

    Args:
        path_or_repo: a folder, or a repo id such as ``mlx-community/Qwen3.6-35B-A3B-4bit``.
        allow_patterns: which files of a repo to fetch; None for everything mlx-lm needs.
        revision: a branch, tag or commit of the repo.

    Raises:
        UsageError: it is neither.
    """
    path = Path(path_or_repo).expanduser()
    if path.exists():
        return path
    from mlx_lm.utils import _download

    try:
        return Path(_download(str(path_or_repo), revision=revision, allow_patterns=allow_patterns))
    except Exception as error:  # the hub raises its own, requests', httpx's and OS errors
        raise UsageError(
            f"model {str(path_or_repo)!r} is neither a folder nor a Hugging Face repo within reach: "
            f"{_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:") if lines else type(error).__name__
