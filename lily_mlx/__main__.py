"""``python -m lily_mlx`` is ``lily-mlx``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
