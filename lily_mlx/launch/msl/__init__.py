"""The Metal Shading Language as a C++ compiler can read it: headers in ``include/`` and a token rewriter."""

from pathlib import Path

INCLUDE_DIR = Path(__file__).parent / "include"
