"""Generate from one checkpoint with stock MLX-LM and with Lily, and compare text, tokens and speed.

python examples/ab.py [--model PATH] [--prompt TEXT] [--max-tokens N]
"""

import argparse
import sys
import time
from pathlib import Path

import mlx_lm
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

import lily_mlx
from lily_mlx.engine import one_line_errors
from lily_mlx.errors import LilyError

TINY = Path(__file__).parent / "tiny-qwen3_6-moe-4bit"
console = Console()


def generate(load, model_path, prompt, max_tokens):
    """Load with one engine and generate greedily; returns tokens, text and the last response's statistics."""
    model, tokenizer = load(str(model_path))
    chat = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    tokens, text, response = [], "", None
    for response in mlx_lm.stream_generate(model, tokenizer, chat, max_tokens=max_tokens):
        tokens.append(response.token)
        text += response.text
    return tokens, text, response


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default=TINY, help="a Qwen3.5/3.6 checkpoint (default: the tiny one beside this file)"
    )
    parser.add_argument("--prompt", default="Complete this function: def add(a, b):")
    parser.add_argument("--max-tokens", type=int, default=60)
    args = parser.parse_args()
    if args.max_tokens < 1:
        parser.error(f"--max-tokens is {args.max_tokens}; it must be at least 1")

    results = {}
    for name, load in {"mlx": mlx_lm.load, "lily": lily_mlx.load}.items():
        console.print(f"[bold]--engine {name}[/bold]  {args.model}")
        started = time.perf_counter()
        try:
            with one_line_errors(args.model):
                results[name] = generate(load, args.model, args.prompt, args.max_tokens)
        except LilyError as error:
            parser.error(str(error))
        console.print(Panel(escape(results[name][1].strip()), title=f"{time.perf_counter() - started:.1f} s"))

    table = Table(title="one run of each engine: a look, not a benchmark")
    for column in ("engine", "prompt tok/s", "generation tok/s", "tokens"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name, (tokens, _, response) in results.items():
        table.add_row(name, f"{response.prompt_tps:.1f}", f"{response.generation_tps:.1f}", str(len(tokens)))
    console.print(table)

    stock, lily = results["mlx"][0], results["lily"][0]
    if stock == lily:
        console.print(f"[green]the engines agree on all {len(stock)} tokens[/green]")
        return 0
    same = next(
        (i for i, (a, b) in enumerate(zip(stock, lily, strict=False)) if a != b), min(len(stock), len(lily))
    )
    console.print(f"[yellow]the engines agree on the first {same} tokens, then choose differently[/yellow]")
    return 1


if __name__ == "__main__":
    sys.exit(main())
