"""A decoding step of a few small layers, for tests that run it in a separate process."""

import ctypes

import torch

from quantbench import models
from quantbench.generate import Generator
from quantbench.models.config import ModelConfig
from quantbench.ops.cpu import build
from tests.models.small import by_steps, on_kernel

SLOTS, VOCABULARY = 32, 256
CONFIG = ModelConfig("small", 256, 4, 4, 2, 64, 512, VOCABULARY, SLOTS)


class SmallStep:
    """A model with random weights, and tokens for each row."""

    def __init__(self, seed: int = 0, rows: int = 1) -> None:
        draw = torch.Generator().manual_seed(seed)  # other threads draw at the same time
        model = models.build(CONFIG).requires_grad_(False)
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=draw)
        self.tokens = torch.randint(VOCABULARY, (rows, SLOTS), generator=draw)
        self.generator = Generator(on_kernel(model), rows, SLOTS, decoder="cpu-step")

    def sequence(self) -> torch.Tensor:
        """Logits, position after position. The same again when called again."""
        return by_steps(self.generator, self.tokens)


def fail_allocation(member: int, layer: int) -> None:
    """In the next step that one member's allocation fails, in that layer; -1: in none."""
    build.load().quantbench_fail_allocation(ctypes.c_int64(member), ctypes.c_int64(layer))
