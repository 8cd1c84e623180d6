"""Counts of what really ran: model classes and kernels.

``LILY_STATS=1`` prints them to stderr when the process ends, so that a user can see which path a command
took: ``lily: model.qwen3_5_moe=61 op.gated_delta_scan=366``.
"""

from __future__ import annotations

import atexit
import sys
from collections import Counter

counts: Counter[str] = Counter()
"""``model.<type>`` counts forward calls, ``op.<name>`` kernel launches; reset with ``counts.clear()``."""


def report_at_exit() -> None:
    """Print the counts when the interpreter ends. Idempotent."""
    atexit.unregister(_report)
    atexit.register(_report)


def _report() -> None:
    text = " ".join(f"{name}={count}" for name, count in sorted(counts.items())) or "nothing of Lily ran"
    print(f"lily: {text}", file=sys.stderr)
