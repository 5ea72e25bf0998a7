"""Turns: the short pieces of a run that comparisons take in cycles, arm after arm.

    turns = Turns(plan, generator)
    turns.decode(8)         # seconds of 8 decoding steps
    turns.prompt()          # seconds of the prompt and the first new token

A turn of decoding goes on where the last one stopped, so that steps see the tokens, the experts and
the positions of a run of --max_new_tokens, and begins again behind the prompt at its end. Its first
step is not counted: it brings the arm's weights back into the processor's caches.
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantbench import devices
from quantbench.environment import without_collections
from quantbench.run.plan import Plan

if TYPE_CHECKING:
    from quantbench.generate import Generator


class DecodingTurns:
    def __init__(self, plan: Plan, generator: "Generator") -> None:
        config = plan.config
        self.plan, self.generator, self.start = plan, generator, config.context_depth
        self.prompts = torch.tensor([plan.prompt] * config.batch_size, device=plan.device)
        self.steps = config.max_new_tokens - 1  # decoding steps behind a prompt
        self.left = 0  # of them, in the stream
        self.stream: Iterator[Tensor] = iter(())
        self.steps_taken: list[float] = []  # seconds of each token of the last turn

    def prompt(self) -> float:
        """Seconds until the first new token; every row reads the prompt."""
        self.stream = self.generator.stream(self.prompts, self.start)
        self.left = self.steps
        return self._seconds(1)

    def decode(self, steps: int) -> float:
        """Seconds of `steps` decoding steps, at most `self.steps`, after one that does not
        count."""
        if self.left <= steps:  # the prompt's last token, where layers still remember the others
            first = len(self.plan.prompt) - 1
            if self.generator.keep(self.start + first) < self.start + first:
                first = 0
            self.stream = self.generator.stream(self.prompts[:, first:], self.start + first)
            self.left = self.steps + 1
        next(self.stream)
        self.left -= steps + 1
        return self._seconds(steps)

    def _seconds(self, tokens: int) -> float:
        device = self.plan.device
        devices.synchronize(device)
        with without_collections():
            started = time.perf_counter()
            moments = [devices.moment(device)]
            for _ in range(tokens):
                next(self.stream)
                moments.append(devices.moment(device))
            devices.synchronize(device)
            seconds = time.perf_counter() - started
        self.steps_taken = devices.intervals(moments)
        return self.plan.ranks.first((seconds,), device)[0]
