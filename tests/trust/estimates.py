"""Estimates of this machine as a user meets them: `estimate`, and at once the run that verifies it.

    python -m tests.trust.estimates --max_minutes 60     # docs/data/estimates.json
    python -m quantbench estimate --validate docs/data/estimates.json

Small models come first, and the command ends where the next case would exceed the time; the file is
written anew after each case. A case takes two processes: `estimate --json`, then `generate`.
"""

import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from quantbench.estimate.validate import of_results, report
from quantbench.log.about import about

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "docs/data/estimates.json"
# Presets, and shapes of which none is published under a preset's name: width, layers, query heads,
# key/value heads, feed-forward width, vocabulary.
SHAPES = {
    "smollm2-like-135m": (576, 30, 9, 3, 1536, 49152),
    "smollm2-like-360m": (960, 32, 15, 5, 2560, 49152),
    "wide-and-shallow": (2048, 8, 16, 8, 5632, 32000),
    "narrow-and-deep": (768, 48, 12, 4, 2048, 32000),
}
MODELS = ("smollm2-like-135m", "smollm2-like-360m", "narrow-and-deep", "wide-and-shallow",
          "Qwen2.5-0.5B", "Qwen3-0.6B", "TinyLlama-1.1B-Chat-v1.0", "Llama-3.2-1B")  # fmt: skip
SCHEMES = ("none", "int8wo", "int4wo-64")
BATCHES, PROMPTS, NEW_TOKENS = (1, 4), (128, 1024), 64
KINDS = {"prompt": "prompt_seconds", "token": "token_seconds"}


def checkpoint(name: str, folder: Path) -> str:
    """What --checkpoint_path takes for a model of random weights."""
    if name not in SHAPES:
        return f"dummy:{name}"
    dim, layers, heads, kv_heads, ffn, vocab = SHAPES[name]
    path = folder / f"{name}.json"
    path.write_text(json.dumps({
        "model_type": "llama", "hidden_size": dim, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": ffn,
        "vocab_size": vocab, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    }))  # fmt: skip
    return f"dummy:{path}"


def quantbench(folder: Path, *words: object) -> Any:
    """The JSON that a command writes. Raises CalledProcessError with what it said."""
    path = folder / "out.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "quantbench", *map(str, words), str(path)]
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return json.loads(path.read_text())


def measured(name: str, scheme: str, batch: int, prompt: int, folder: Path) -> list[dict[str, Any]]:
    """A prompt and a step, estimated and then measured."""
    shared = ("--checkpoint_path", checkpoint(name, folder), "--quantization", scheme,
              "--batch_size", batch)  # fmt: skip
    estimate = quantbench(folder, "estimate", *shared, "--sequence_length", prompt,
                          "--new_tokens", NEW_TOKENS, "--json")  # fmt: skip
    run = quantbench(folder, "generate", *shared, "--prefill_size", prompt, "--max_new_tokens",
                     NEW_TOKENS, "--write_result", "none", "--num_samples", 3,
                     "--output_json_path")  # fmt: skip
    samples = run["samples"]
    seconds = {
        "prompt": statistics.median(s["prefill_seconds"] for s in samples),
        "token": statistics.median(s["decode_seconds"] for s in samples) / (NEW_TOKENS - 1),
    }
    about_case = {"model": name, "scheme": scheme, "batch": batch, "positions": prompt}
    return [
        {**about_case, "kind": kind, "measured_seconds": seconds[kind],
         "estimated_seconds": estimate[figure]["value"],
         "low": estimate[figure]["low"], "high": estimate[figure]["high"]}
        for kind, figure in KINDS.items()
    ]  # fmt: skip


@click.command()
@click.option("--max_minutes", type=float, default=60.0, help="Time for all cases [60]")
def main(max_minutes: float) -> None:
    started, longest, cases = time.monotonic(), 0.0, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for case in itertools.product(MODELS, SCHEMES, BATCHES, PROMPTS):
            before = time.monotonic()
            if before - started + longest > 60 * max_minutes:
                click.echo(f"The time is over before {' '.join(map(str, case))}", err=True)
                break
            try:
                cases += measured(*case, Path(folder))
            except subprocess.CalledProcessError as error:
                click.echo(f"{' '.join(map(str, case))}: {error.stderr[-500:]}", err=True)
                continue
            longest = max(longest, time.monotonic() - before)
            value = {"about": dataclasses.asdict(about()), "cases": cases}
            RESULT.write_text(json.dumps(value, indent=1) + "\n")
            click.echo(f"{len(cases) // 2} cases, {time.monotonic() - started:.0f} s", err=True)
    if cases:
        inside = [c["low"] <= c["measured_seconds"] <= c["high"] for c in cases]
        click.echo(report(of_results(RESULT)), nl=False)
        click.echo(f"- within their intervals: {sum(inside)} of {len(inside)}")


if __name__ == "__main__":
    main()
