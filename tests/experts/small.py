"""Small mixtures of experts, whole and in two tiers, with the same weights."""

import random
from functools import cache
from pathlib import Path

import pytest
import torch

from quantbench.experts.slow import Memory, new_file
from quantbench.experts.tiers import POLICIES, Tiers
from quantbench.generate import Generator
from quantbench.models.loading import load_config, load_model
from quantbench.ops.cpu import build
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse

CPU = torch.device("cpu")
FAST = [{0, 3}, {1}, set(), {2, 4, 5}, {7}]  # 7 of tiny_moe's experts, by layer
REFUSAL = build.refusal()
NEEDS_KERNELS = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


def quantizer(scheme: str, precision: torch.dtype = torch.bfloat16, kernel: str = "auto"):
    return Quantizer(parse(scheme), CPU, precision, kernel)


@cache
def whole(
    path: str = "tiny_moe",
    scheme: str = "int8wo",
    precision: torch.dtype = torch.bfloat16,
    kernel: str = "auto",
):
    """The model, all of its experts in one memory. Tests share it, and leave it as it is."""
    stages = quantizer(scheme, precision, kernel)
    return load_model(path, precision=precision, transform=stages)


def tiered(
    policy: str,
    slow: Path | None,
    path: str = "tiny_moe",
    scheme: str = "int8wo",
    precision: torch.dtype = torch.bfloat16,
    kernel: str = "auto",
):
    """The model and its tiers. slow: a folder; None: RAM under a CPU in the place of a card."""
    tier = Memory(pinned=False) if slow is None else new_file(slow)
    tiers = Tiers(tier, load_config(path), CPU, POLICIES[policy])
    stages = tiers.after(quantizer(scheme, precision, kernel))
    model = load_model(path, precision=precision, transform=stages)
    tiers.attach(model)
    return model, tiers


def hold_some(tiers: Tiers, count: int | None = None) -> None:
    """Random experts in fast memory, a random number of them if none is given, and more room."""
    count = random.randrange(len(tiers.keys)) if count is None else count
    fast: list[set[int]] = [set() for _ in range(max(tiers.layers) + 1)]
    for layer, expert in random.sample(tiers.keys, count):
        fast[layer].add(expert)
    tiers.hold(fast, count + tiers.least + random.randint(0, 7))


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


def routing(tokens: torch.Tensor) -> list[tuple[int, set[int]]]:
    """(layer, experts of the token) as the modules of tiny_moe choose them, for tokens (1, S)."""
    model, chosen = whole(precision=torch.float32), list[tuple[int, set[int]]]()
    hooks = [
        layer.feed_forward.router.register_forward_hook(
            lambda *a, number=number: chosen.append((number, set(a[2][0].flatten().tolist())))
        )
        for number, layer in enumerate(model.layers)
    ]
    decoded(model, tokens, "modules")
    for hook in hooks:
        hook.remove()
    return chosen


def when_held(monkeypatch, action) -> None:
    """Call action(slow tier) when the first experts are in fast memory: in the middle of a run."""
    hold = Tiers.hold

    def and_then(self, *arguments):
        hold(self, *arguments)
        action(self.slow)

    monkeypatch.setattr(Tiers, "hold", and_then)
