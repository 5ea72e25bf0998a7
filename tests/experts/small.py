"""Small mixtures of experts, whole and in two tiers, with the same weights."""

import random
from pathlib import Path

import torch

from quantbench.experts.slow import Memory, new_file
from quantbench.experts.tiers import Policy, Tiers
from quantbench.generate import Generator
from quantbench.models.loading import load_config, load_model
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse

CPU = torch.device("cpu")


def quantizer(scheme: str, precision: torch.dtype = torch.bfloat16, kernel: str = "auto"):
    return Quantizer(parse(scheme), CPU, precision, kernel)


def whole(path: str, scheme: str, precision: torch.dtype = torch.bfloat16, kernel: str = "auto"):
    """The model, all of its experts in one memory."""
    stages = quantizer(scheme, precision, kernel)
    return load_model(path, precision=precision, transform=stages)


def tiered(
    path: str,
    scheme: str,
    policy: Policy,
    slow: Path | None,
    precision: torch.dtype = torch.bfloat16,
    kernel: str = "auto",
):
    """The model and its tiers. slow: a folder; None: RAM under a CPU in the place of a card."""
    tier = Memory(pinned=False) if slow is None else new_file(slow)
    tiers = Tiers(tier, load_config(path), CPU, policy)
    stages = tiers.after(quantizer(scheme, precision, kernel))
    model = load_model(path, precision=precision, transform=stages)
    tiers.attach(model)
    return model, tiers


def some(tiers: Tiers, count: int, draw: random.Random) -> list[set[int]]:
    """So many experts, anywhere."""
    fast: list[set[int]] = [set() for _ in range(max(tiers.layers) + 1)]
    for layer, expert in draw.sample(tiers.keys, count):
        fast[layer].add(expert)
    return fast


def logits(model, rows: int = 1, steps: int = 4, decoder: str = "modules") -> torch.Tensor:
    """Logits of a prompt in two chunks and of decoding steps, for rows of different tokens."""
    generator = Generator(model, rows, 64, decoder=decoder)
    draw = torch.Generator().manual_seed(rows)
    tokens = torch.randint(model.config.vocab_size, (rows, 24 + steps), generator=draw)
    with torch.no_grad():
        parts = [generator.forward(tokens[:, :17], 0), generator.forward(tokens[:, 17:24], 17)]
        parts += [generator.forward(tokens[:, i : i + 1], i) for i in range(24, 24 + steps)]
    return torch.cat(parts, 1)


def decoded(model, tokens: torch.Tensor, decoder: str, kv_cache: str = "dense") -> torch.Tensor:
    """Logits of tokens (1, S), each by a decoding step."""
    generator = Generator(model, 1, tokens.shape[1], kv_cache, decoder)
    with torch.no_grad():
        steps = [generator.forward(tokens[:, i : i + 1], i) for i in range(tokens.shape[1])]
    return torch.cat(steps, 1)


def when_held(monkeypatch, action) -> None:
    """Call action(slow tier) when the first experts are in fast memory: in the middle of a run."""
    hold = Tiers.hold

    def and_then(self, *arguments):
        hold(self, *arguments)
        action(self.slow)

    monkeypatch.setattr(Tiers, "hold", and_then)
