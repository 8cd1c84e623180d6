"""Reading a checkpoint's config and safetensors headers, and saying in one line what is wrong with them.

Nothing here loads weights or needs MLX, so that a 20 GB checkpoint is checked in milliseconds.
"""

from __future__ import annotations

import json
import math
import os.path
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UnsupportedModelError, UsageError, in_one_line

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
_LARGEST_SIZE = 2**31 - 1  # MLX's shapes are int32
_DEFAULT_ROTARY_FACTOR = 0.25  # stock's
# Sizes of the config that a weight's shape shows, in stock's layout and in Hugging Face's: the largest of the
# axes, because the convolution is [channels, kernel, 1] in one and [channels, 1, kernel] in the other.
_ROWS, _REST = slice(0, 1), slice(1, None)
_SIZES_IN_WEIGHTS = {
    ".embed_tokens.weight": ("vocab_size", _ROWS),
    ".input_layernorm.weight": ("hidden_size", _ROWS),
    ".linear_attn.A_log": ("linear_num_value_heads", _ROWS),
    ".linear_attn.norm.weight": ("linear_value_head_dim", _ROWS),
    ".linear_attn.conv1d.weight": ("linear_conv_kernel_dim", _REST),
    ".self_attn.q_norm.weight": ("head_dim", _ROWS),
    ".mlp.gate.weight": ("num_experts", _ROWS),
}
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_NOT_TEXT = re.compile(r"(^|\.)(mtp|visual|vision_tower)\.")
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
    if not os.path.isdir(path):
        raise UsageError(
            f"model {str(path)!r} is not a folder; give a checkpoint folder or a Hugging Face repo"
        )
    config = _read_json(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise UsageError(
            f"{path / 'config.json'} has no model_type; it must be one of {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    return config


def _read_json(file: Path) -> dict[str, Any]:
    _check_is_file(file)
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # a too long number and bad UTF-8 are ValueErrors as well
        raise UsageError(f"{file} is not JSON: {in_one_line(error)}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{file} holds {type(value).__name__}; it must be a JSON object")
    return value


def _check_is_file(path: Path) -> None:
    if os.path.isfile(path):
        return
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder; it must be a file")
    if os.path.islink(path):
        raise UsageError(f"{path} is a link to nowhere; it must be a file")
    if os.path.lexists(path):
        raise UsageError(f"{path} is not a regular file")
    raise UsageError(f"{path} is missing; a checkpoint folder has a {path.name}")


def check_supported(config: Mapping[str, Any], where: Path | str) -> None:
    """Raise unless Lily has a class for this config and its sizes are possible.

    Args:
        config: a checkpoint's config, nested or flat.
        where: what to call it in the message.

    Raises:
        UnsupportedModelError: the model type has no Lily class, or a size is beyond Lily's limits.
        UsageError: a needed key is missing, or a value is impossible.
    """
    if config["model_type"] not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModelError(
            f"{where} has model type {config['model_type']!r}, for which Lily has no class; "
            f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if config.get("model_file") is not None:
        raise UnsupportedModelError(
            f"{where} brings its own class in {config['model_file']!r} (model_file); Lily runs only its own"
        )
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise UsageError(f"{where}: text_config is {text!r}; it must be a JSON object")
    moe = config["model_type"] == "qwen3_5_moe" or bool(text.get("num_experts"))
    needed = _SIZES + (_MOE_SIZES if moe else ("intermediate_size",))
    if missing := [key for key in needed if key not in text]:
        raise UsageError(f"{where}: the config lacks {', '.join(missing)}")
    for key in (*needed, *(key for key in _OPTIONAL_SIZES if key in text)):
        if key != "head_dim" or text[key] is not None:
            _check_size(text, key, where)
    _check_sizes(text, where, moe)
    if "rms_norm_eps" in text:
        _check_number(text, "rms_norm_eps", where)
    _check_rotary(text, where)
    _check_quantization(config, where)
    for key, value in _head_sizes(text).items():
        if value % _HEAD_SIZE_MULTIPLE:
            raise UnsupportedModelError(
                f"{where}: {key} is {value}; for Lily a head size must be a multiple of {_HEAD_SIZE_MULTIPLE}"
            )


def _check_size(part: Mapping[str, Any], key: str, where: Path | str) -> None:
    value = part[key]
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UsageError(f"{where}: {key} is {value!r}; it must be a positive integer")
    if value > _LARGEST_SIZE:
        raise UsageError(f"{where}: {key} is {value}; it cannot exceed {_LARGEST_SIZE}")


def _check_number(part: Mapping[str, Any], key: str, where: Path | str) -> None:
    value = part[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UsageError(f"{where}: {key} is {value!r}; it must be a positive number")


def _head_sizes(text: Mapping[str, Any]) -> dict[str, int]:
    return {
        "head_dim": text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        "linear_key_head_dim": text["linear_key_head_dim"],
        "linear_value_head_dim": text["linear_value_head_dim"],
    }


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
    limits = [("full_attention_interval", "num_hidden_layers")]
    if moe:
        limits.append(("num_experts_per_tok", "num_experts"))
    for key, limit in limits:
        if key in text and text[key] > text[limit]:
            raise UsageError(f"{where}: {key} is {text[key]}; it cannot exceed {limit}, {text[limit]}")


def _check_rotary(text: Mapping[str, Any], where: Path | str) -> None:
    rope = text.get("rope_parameters")
    if not isinstance(rope, Mapping | None):
        raise UsageError(f"{where}: rope_parameters is {rope!r}; it must be a JSON object")
    rope = rope or text
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            _check_number(rope, key, where)
    factor = rope.get("partial_rotary_factor", _DEFAULT_ROTARY_FACTOR)
    if factor > 1:
        raise UsageError(f"{where}: partial_rotary_factor is {factor}; it cannot exceed 1")
    head_dim = _head_sizes(text)["head_dim"]
    rotary = int(head_dim * factor)
    if rotary < 2 or rotary % 2:
        raise UsageError(
            f"{where}: partial_rotary_factor {factor} of head_dim {head_dim} is {rotary}; "
            "it must be an even number above 0"
        )


def _check_quantization(config: Mapping[str, Any], where: Path | str) -> None:
    for key in ("quantization", "quantization_config"):
        if not isinstance(config.get(key), Mapping | None):
            raise UsageError(f"{where}: {key} is {config[key]!r}; it must be a JSON object")
    quantization = config.get("quantization")
    if quantization is None:  # then stock asks the other how its weights were made
        if config.get("quantization_config") and "quant_method" not in config["quantization_config"]:
            raise UsageError(f"{where}: quantization_config lacks quant_method")
        return
    for key in ("bits", "group_size"):
        if key not in quantization:
            raise UsageError(f"{where}: quantization lacks {key}")
        _check_size(quantization, key, where)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the headers of every ``model*.safetensors`` in a checkpoint folder.

    Raises:
        UsageError: there is none, one that the index names is missing, or one is damaged or cut short.
    """
    from safetensors import SafetensorError, safe_open

    files, absent = _weight_files(path)
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise UsageError(
            f"{path} lacks {', '.join(absent[:3])}{more}, which its model.safetensors.index.json names"
        )
    if not files:
        raise UsageError(f"{path} has no model*.safetensors; a checkpoint folder holds its weights there")
    tensors: dict[str, Tensor] = {}
    for file in files:
        _check_is_file(file)
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 - safe_open is not iterable
                    part = opened.get_slice(name)
                    tensors[name] = Tensor(part.get_dtype(), tuple(part.get_shape()), file.name)
        except (SafetensorError, OSError) as error:
            raise UsageError(
                f"{file} is damaged or cut short: {in_one_line(error)}; download it again"
            ) from None
    return tensors


def _weight_files(path: Path) -> tuple[list[Path], list[str]]:
    """A checkpoint's safetensors files, and the names of those that its index names but that are absent."""
    files = sorted(path.glob("model*.safetensors"))
    index = path / "model.safetensors.index.json"
    if not os.path.lexists(index):
        return files, []
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UsageError(f"{index} is not a safetensors index; it must have a weight_map of file names")
    return files, sorted(set(names.values()) - {file.name for file in files})


def read_checkpoint(path: Path, *, weights: bool = True) -> Checkpoint:
    """Read and check a checkpoint that Lily is to run: config, sizes, safetensors headers.

    Args:
        path: its folder.
        weights: whether the weights must be there; if not, and some are not, ``tensors`` is empty.

    Raises:
        UsageError: see :func:`read_config`, :func:`check_supported` and :func:`read_tensors`; or the config
            and the weights are not of one model.
    """
    config = read_config(path)
    check_supported(config, path)
    if not weights:
        files, absent = _weight_files(path)
        if absent or not files or not all(map(os.path.isfile, files)):
            return Checkpoint(path, config, {})
    tensors = read_tensors(path)
    _check_fit(text_config(config), tensors, path)
    return Checkpoint(path, config, tensors)


def _check_fit(text: Mapping[str, Any], tensors: Mapping[str, Tensor], where: Path) -> None:
    layers = 0
    for name, tensor in tensors.items():
        if _NOT_TEXT.search(name):
            continue
        if layer := _LAYER.search(name):
            layers = max(layers, int(layer[1]) + 1)
        for suffix, (key, axes) in _SIZES_IN_WEIGHTS.items():
            if name.endswith(suffix) and text.get(key) and text[key] != max(tensor.shape[axes], default=0):
                raise UsageError(
                    f"{where}: {key} is {text[key]}, but the weight {name} has shape {list(tensor.shape)}"
                )
    if layers != text["num_hidden_layers"]:
        raise UsageError(
            f"{where}: num_hidden_layers is {text['num_hidden_layers']}, but the weights have {layers} layers"
        )


def check_tokenizer(path: Path) -> None:
    """Raise UsageError unless the folder holds a tokenizer."""
    if not any(os.path.isfile(path / name) for name in _TOKENIZER_FILES):
        raise UsageError(f"{path} has no tokenizer; it must hold one of {', '.join(_TOKENIZER_FILES)}")


def resolve(
    path_or_repo: str | Path, revision: str | None = None, allow_patterns: Collection[str] | None = None
) -> Path:
    """The local folder of a checkpoint: the path itself, or the snapshot of a Hugging Face repo.

    Takes what ``mlx_lm.utils._download`` takes, whose place it can have.

    Args:
        path_or_repo: a folder, or a repo id such as ``mlx-community/Qwen3.6-35B-A3B-4bit``.
        revision: a branch, tag or commit of the repo.
        allow_patterns: which files of a repo to fetch; None for everything mlx-lm needs.

    Raises:
        UsageError: it is neither.
    """
    path = Path(path_or_repo)
    if os.path.exists(path):  # never an error, as Path.exists is for a name that is too long
        return path
    from mlx_lm import utils

    try:
        return Path(
            utils.snapshot_download(
                str(path_or_repo),
                revision=revision,
                allow_patterns=allow_patterns or utils.DEFAULT_ALLOW_PATTERNS,
            )
        )
    except Exception as error:  # the hub raises its own, requests', httpx's and OS errors
        raise UsageError(
            f"model {str(path_or_repo)!r} is neither a folder nor a Hugging Face repo within reach: "
            f"{in_one_line(error)}"
        ) from error
