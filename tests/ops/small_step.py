"""A decoding step of a few small layers, for tests that run it in a separate process."""

import ctypes

import torch

from quantbench.ops.cpu import build
from quantbench.ops.cpu import step as step  # registers the op

DIM, HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS, SLOTS = 256, 4, 2, 64, 512, 4, 32


class SmallStep:
    """Layers with random weights; `run` puts a token of each row through them."""

    def __init__(self, seed: int = 0, rows: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) / 16

        missing, how = torch.zeros(0), step.How(False, 0, 0, HEAD_DIM**-0.5)
        frequencies = 10.0 ** -torch.linspace(0, 4, HEAD_DIM // 2)
        rotations = torch.stack((frequencies, torch.ones(HEAD_DIM // 2)))[:, None]
        hows = torch.tensor([how] * LAYERS, dtype=torch.float64)
        qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.weights, self.caches = [], []
        for _ in range(LAYERS):
            # In the order of `Part` in ops/cpu/src/step/step.h; no biases, no norms of heads.
            self.weights += [
                *(1 + random(DIM), random(qkv, DIM), missing, missing, missing),
                *(random(DIM, HEADS * HEAD_DIM), missing),
                *(missing, 1 + random(DIM), random(2 * WIDTH, DIM), missing),
                *(random(DIM, WIDTH), missing, missing),
            ]
            self.caches += [torch.zeros(rows, KV_HEADS, SLOTS, HEAD_DIM) for _ in range(2)]
        self.x, output = random(rows, DIM), step.Linear(random(DIM, DIM), None)
        ending, sizes = (torch.ones(DIM), output, [DIM]), (HEADS, KV_HEADS, WIDTH, 1e-5)
        self.op = step.Step(self.weights, self.caches, "dense", hows, rotations, *ending, *sizes)

    def run(self, position: int) -> torch.Tensor:
        """The logits after x at this position, whose keys and values the layers store."""
        return self.op(self.x, torch.tensor([position]))

    def sequence(self) -> torch.Tensor:
        """One position after another: (SLOTS · rows, DIM). The same again when called again."""
        return torch.cat([self.run(position) for position in range(SLOTS)])


def fail_allocation(member: int, layer: int) -> None:
    """In the next step that one member's allocation fails, in that layer; -1: in none."""
    build.load().quantbench_fail_allocation(ctypes.c_int64(member), ctypes.c_int64(layer))
