"""How near to the memory's limit decoding steps of a mixture come, whose tokens are random, so that
each step goes through other experts.

    python -m tests.run.mixture_steps --checkpoint_path dummy:Qwen3-30B-A3B --num_layers 4

Steps and readings of the bandwidth take turns in one process; a line for each scheme, with the
median share of the limit and the range of the rounds. --rows N,N times the model's modules, too.
"""

import statistics
import time
from typing import TYPE_CHECKING

import click

from quantbench.models.llama import step_bytes
from quantbench.run import environment

environment.prepare()  # before torch is imported: it reads the variables once

if TYPE_CHECKING:
    from quantbench.generate import Generator

WARM_UP, STEPS, ROUNDS, POSITIONS = 8, 24, 4, 64


def seconds(generator: "Generator", steps: int) -> float:
    """The median time of so many steps, each of tokens drawn anew."""
    import torch

    shape = (steps, generator.batch_size, 1)
    tokens, ticks = torch.randint(generator.model.config.vocab_size, shape), []
    for i in range(steps):
        start = time.perf_counter()
        generator.decoder.step(tokens[i], torch.tensor([i]))
        ticks.append(time.perf_counter() - start)
    return statistics.median(ticks)


@click.command()
@click.option("--checkpoint_path", default="dummy:Qwen3-30B-A3B")
@click.option("--num_layers", default=4)
@click.option("--schemes", default="int4wo-128,int8wo,none")
@click.option("--rows", default="1")
def main(checkpoint_path: str, num_layers: int, schemes: str, rows: str) -> None:
    import torch

    from quantbench.generate import Generator
    from quantbench.models.loading import load_model
    from quantbench.quantize.registry import Quantizer
    from quantbench.quantize.spec import parse_scheme
    from quantbench.run.bandwidth import Bandwidth

    torch.set_grad_enabled(False)
    bandwidth = Bandwidth(torch.device("cpu"))
    for scheme in schemes.split(","):
        quantizer = Quantizer(parse_scheme(scheme), torch.device("cpu"), torch.bfloat16)
        model = load_model(checkpoint_path, "cpu", torch.bfloat16, num_layers, quantizer)
        for count in map(int, rows.split(",")):
            fused, modules = (
                Generator(model, count, POSITIONS, decoder=name) for name in ("cpu-step", "modules")
            )
            seconds(fused, WARM_UP)
            taken, shares = [], []
            for _ in range(ROUNDS):
                limit = step_bytes(model, count) / bandwidth.measure()
                taken.append(seconds(fused, STEPS))
                shares.append(limit / taken[-1])
            line = f"{scheme}, {count} rows: {step_bytes(model, count) / 1e6:.0f} MB in "
            line += f"{statistics.median(taken) * 1e3:.2f} ms, {statistics.median(shares):.2f} of "
            line += f"the limit ({min(shares):.2f} to {max(shares):.2f})"
            if count > 1:
                ratio = seconds(modules, STEPS // 4) / statistics.median(taken)
                line += f"; the modules take {ratio:.1f} times as long"
            print(line, flush=True)


if __name__ == "__main__":
    main()
