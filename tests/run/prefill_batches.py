"""The rate at which prompts are read, by batch size: python -m tests.run.prefill_batches OPTIONS

    python -m tests.run.prefill_batches --checkpoint_path dummy:Llama-3.2-1B --num_layers 4 \\
        --prefill_size 1024 --quantization int8wo --device cpu

Takes options of generate.py. One process loads the model and reads prompts of 1 and of 8 rows in
turns, so that the machine's drift meets both; prints tokens per second and their ratio, pair by
pair. --prefill_chunk counts for the 8 rows alone.
"""

import statistics
import sys
from dataclasses import replace

import torch

from quantbench.cli import quiet
from quantbench.generate import Generator
from quantbench.log.options import parse
from quantbench.run import environment, loading
from quantbench.run.plan import make_plan

BATCH_SIZES = (1, 8)
PAIRS = 5  # after a pair that does not count


def rates(generators: dict[int, Generator], prompt: list[int]) -> dict[int, float]:
    """Prompt tokens per second, of all rows, for each batch size."""
    measured = {}
    for rows, generator in generators.items():
        tokens = torch.tensor([prompt] * rows, device=generator.device)
        measured[rows] = tokens.numel() / generator.generate(tokens, 1).prefill_seconds
    return measured


def main(words: list[str]) -> None:
    environment.prepare()
    quiet(False)
    config = replace(parse(words), max_new_tokens=1)
    plan = make_plan(config)
    model = loading.load(plan, lambda done, total: None, print).model
    positions = len(plan.prompt) + 1
    generators = {
        rows: Generator(
            model,
            rows,
            positions,
            plan.kv_cache,
            prefill_chunk=config.prefill_chunk if rows > 1 else None,
        )
        for rows in BATCH_SIZES
    }
    pairs = [rates(generators, plan.prompt) for _ in range(PAIRS + 1)][1:]
    for rows in BATCH_SIZES:
        own = sorted(pair[rows] for pair in pairs)
        median = statistics.median(own)
        print(f"batch {rows}: {median:8.1f} tokens/s ({own[0]:.1f} to {own[-1]:.1f})")
    ratios = sorted(pair[BATCH_SIZES[-1]] / pair[BATCH_SIZES[0]] for pair in pairs)
    median = statistics.median(ratios)
    print(
        f"{plan.spec}, prompts of {len(plan.prompt)}: batch {BATCH_SIZES[-1]} at {median:.3f} of "
        f"batch {BATCH_SIZES[0]}'s rate ({ratios[0]:.3f} to {ratios[-1]:.3f}, {PAIRS} pairs)"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
