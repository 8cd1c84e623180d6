"""No speed without correctness: every arm's logits against stock's, before anything is timed.

The reference is stock as it is, one token at a time. An arm runs the same tokens as a chunk and then one by
one, so that both of its paths are seen. Two engines that round to bfloat16 at different places differ by
about 5 % in the logits and 0.01 nats (bfloat16 against fp32 on the same weights: 4 to 5 % and 0.011 nats, on
random weights and on the tiny checkpoint); two unrelated results by 140 % and several nats. The limits lie
between, nearer to rounding.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from lily_mlx.errors import LilyError

from .arms import Arm

MAX_RELATIVE_ERROR = 0.15
MAX_KL = 0.05
MIN_TOP1 = 0.85
NEAR_TIE = 0.5
"""Nats within which two tokens count as equally likely: what rounding to bfloat16 does to a difference."""

MAX_RELATIVE_ERROR_AT_LENGTH = 0.3
"""For the logits of one position; the others are over all positions of the gate's prompt."""

TOKENS = 32
CHUNK = 24


class GateError(LilyError):
    """An arm computes something else than stock, so its speed means nothing."""


@dataclass(frozen=True)
class Agreement:
    """How far an arm's logits are from the reference.

    Attributes:
        relative_error: root mean square of the difference over that of the reference, both centred, because
            a constant added to all logits changes nothing.
        kl: mean Kullback-Leibler divergence from the reference, nats.
        top1: share of positions whose most likely token is the reference's, or nearly as likely there. Where
            the reference itself is undecided, the token is chosen by rounding: of 32 positions 4 to 7 on the
            tiny checkpoint, for stock in bfloat16 against fp32 as for Lily.
    """

    relative_error: float
    kl: float
    top1: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def agreement(reference: mx.array, logits: mx.array) -> Agreement:
    """Compare logits, or log-probabilities, of shape [positions, vocabulary]."""
    p, q = (x.astype(mx.float32) for x in (reference, logits))
    p, q = p - p.mean(-1, keepdims=True), q - q.mean(-1, keepdims=True)
    error = mx.linalg.norm(p - q) / mx.linalg.norm(p)
    log_p, log_q = (x - mx.logsumexp(x, -1, keepdims=True) for x in (p, q))
    kl = (mx.exp(log_p) * (log_p - log_q)).sum(-1).mean()
    chosen = mx.take_along_axis(log_p, q.argmax(-1, keepdims=True), axis=-1)[..., 0]
    top1 = (chosen >= log_p.max(-1) - NEAR_TIE).astype(mx.float32).mean()
    return Agreement(float(error), float(kl), float(top1))


def check(model: nn.Module, arms: list[Arm], tokens: mx.array, trained: bool) -> dict[str, Agreement]:
    """Compare every arm with stock on a short prompt.

    Args:
        model: stock's.
        arms: what to check.
        tokens: [TOKENS] of the prompt.
        trained: whether probabilities mean anything; of random weights, whose logits are nearly uniform, only
            the relative error is judged.

    Returns:
        The agreement of each arm, by name.

    Raises:
        GateError: an arm is too far from stock, or not finite.
    """
    reference = _logits(model, tokens, chunk=1)
    result = {}
    for arm in arms:
        with arm.active():
            found = agreement(reference, _logits(arm.model, tokens, CHUNK))
        wrong = _wrong(found, trained)
        if wrong:
            raise GateError(
                f"arm {arm.name} {wrong} on a prompt of {tokens.size} tokens; no speed is reported"
            )
        result[arm.name] = found
    return result


def check_at_length(arm: str, phase: str, length: int, reference: mx.array, logits: mx.array) -> None:
    """Compare one position's logits [vocabulary] with those of the first arm.

    Raises:
        GateError: they are too far apart, or not finite.
    """
    error = agreement(reference[None], logits[None]).relative_error
    if not error <= MAX_RELATIVE_ERROR_AT_LENGTH:
        raise GateError(
            f"arm {arm} differs from the first arm by {error:.1%} of the logits after {phase} at length "
            f"{length} (limit {MAX_RELATIVE_ERROR_AT_LENGTH:.0%}); no speed is reported"
        )


def _wrong(found: Agreement, trained: bool) -> str | None:
    """What is wrong, in words. Comparisons are written so that NaN fails them."""
    if not found.relative_error <= MAX_RELATIVE_ERROR:
        return (
            f"differs from stock by {found.relative_error:.1%} of the logits (limit {MAX_RELATIVE_ERROR:.0%})"
        )
    if trained and not found.kl <= MAX_KL:
        return f"is {found.kl:.3f} nats from stock (limit {MAX_KL})"
    if trained and not found.top1 >= MIN_TOP1:
        return f"agrees with stock on {found.top1:.1%} of the most likely tokens (limit {MIN_TOP1:.0%})"
    return None


def _logits(model: nn.Module, tokens: mx.array, chunk: int) -> mx.array:
    """Logits [positions, vocabulary] of a chunk of tokens and then one token at a time."""
    cache: list[Any] = make_prompt_cache(model)
    parts = [model(tokens[None, :chunk], cache=cache)[0]]
    mx.eval(parts)
    for i in range(chunk, tokens.size):
        parts.append(model(tokens[None, i : i + 1], cache=cache)[0])
        mx.eval(parts[-1])
    return mx.concatenate(parts)
