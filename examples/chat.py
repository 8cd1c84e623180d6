"""Several turns through one prompt cache, with Lily as the registered model class.

python examples/chat.py [MODEL]
"""

import sys
from pathlib import Path

import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

import lily_mlx
from lily_mlx.commands import fail
from lily_mlx.engine import one_line_errors
from lily_mlx.errors import LilyError

path = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "tiny-qwen3_6-moe-4bit"
lily_mlx.register()  # from here on mlx_lm.load returns Lily's class for the models it supports
try:
    with one_line_errors(path):
        model, tokenizer = mlx_lm.load(str(path))
except LilyError as error:  # a missing or damaged checkpoint: one line, status 2
    fail(error, "chat.py")

cache = make_prompt_cache(model)
for turn in ("Complete this function: def add(a, b):", "Complete this function: def multiply(a, b):"):
    print(f"> {turn}")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": turn}], add_generation_prompt=True)
    for response in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=60, prompt_cache=cache):
        print(response.text, end="", flush=True)
    print()
