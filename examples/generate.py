"""Generate with Lily from Python: the same two lines as with mlx_lm.

python examples/generate.py [MODEL]
"""

import sys
from pathlib import Path

from mlx_lm import generate

import lily_mlx
from lily_mlx.commands import fail
from lily_mlx.errors import LilyError

path = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "tiny-qwen3_6-moe-4bit"
try:
    model, tokenizer = lily_mlx.load(path)
except LilyError as error:  # a missing or damaged checkpoint: one line, status 2
    fail(error, "generate.py")

messages = [{"role": "user", "content": "Complete this function: def add(a, b):"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
generate(model, tokenizer, prompt, max_tokens=60, verbose=True)
