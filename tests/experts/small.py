"""Small mixtures of experts, whole and in two tiers, with the same weights."""

import os
import random
from functools import cache
from pathlib import Path

import pytest
import torch

from quantbench.experts.slow import Ram, new_file
from quantbench.experts.tiers import POLICIES, Tiers
from quantbench.generate import Generator
from quantbench.models.loading import load_config, load_model
from quantbench.ops.cpu import build
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse
from tests.models.small import by_steps

CPU = torch.device("cpu")
FAST = [{0, 3}, {1}, set(), {2, 4, 5}, {7}]  # 7 of tiny_moe's experts, by layer
REFUSAL = build.refusal()
NEEDS_KERNELS = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


def quantizer(scheme, precision=torch.bfloat16, kernel="auto", device="cpu"):
    return Quantizer(parse(scheme), torch.device(device), precision, kernel)


@cache
def whole(path="tiny_moe", scheme="int8wo", *how):
    """The model, all of its experts in one memory. Tests share it, and leave it as it is.

    how: precision, kernel, device, as for `quantizer`.
    """
    stages = quantizer(scheme, *how)
    return load_model(path, stages.device, stages.dtype, transform=stages)


def tiered(policy, slow: Path | None, path="tiny_moe", scheme="int8wo", *how, beneath=False):
    """The model and its tiers. slow: a folder; None: RAM, under a CPU in the place of a card.
    beneath: whether experts are in RAM in the form of the CPU's kernels, too."""
    stages = quantizer(scheme, *how)
    tier = new_file(slow) if slow else Ram(pinned=stages.device.type == "cuda")
    own = (Ram(pinned=False), quantizer(scheme, stages.dtype)) if beneath else None
    tiers = Tiers(tier, load_config(path), stages.device, POLICIES[policy], own)
    model = load_model(path, stages.device, stages.dtype, transform=tiers.after(stages))
    tiers.attach(model)
    return model, tiers


def hold_some(tiers: Tiers, count: int | None = None) -> None:
    """Random experts in fast memory, a random number of them if none is given, and more room."""
    count = random.randrange(len(tiers.keys)) if count is None else count
    fast: list[set[int]] = [set() for _ in range(max(tiers.layers) + 1)]
    for layer, expert in random.sample(tiers.keys, count):
        fast[layer].add(expert)
    tiers.hold(fast, count + tiers.least + random.randint(0, 7))


def logits(model, rows=1, steps=4, decoder="modules", kv_cache="dense") -> torch.Tensor:
    """Logits of a prompt in two chunks and of decoding steps, for rows of different tokens."""
    generator = Generator(model, rows, 64, kv_cache, decoder)
    draw = torch.Generator().manual_seed(rows)
    tokens = torch.randint(model.config.vocab_size, (rows, 24 + steps), generator=draw)
    tokens = tokens.to(model.tok_embeddings.weight.device)
    parts = [generator.forward(tokens[:, :17], 0), generator.forward(tokens[:, 17:24], 17)]
    return torch.cat([*parts, by_steps(generator, tokens[:, 24:], 24)], 1)


def decoded(model, tokens: torch.Tensor, decoder) -> torch.Tensor:
    """Logits of tokens (1, S), each by a decoding step."""
    return by_steps(Generator(model, 1, tokens.shape[1], decoder=decoder), tokens)


def routing(tokens: torch.Tensor) -> list[tuple[int, set[int]]]:
    """(layer, experts of the token) as the modules of tiny_moe choose them, for tokens (1, S)."""
    model, chosen = whole("tiny_moe", "int8wo", torch.float32), list[tuple[int, set[int]]]()
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


def disk_full(monkeypatch, name: str, works: int, file: str = "") -> None:
    """os.<name> raises when it has worked so often; os.open: for a file of that name."""
    function, calls = getattr(os, name), []

    def fails_later(*arguments, **more):
        if name != "open" or Path(arguments[0]).name == file:
            calls.append(arguments)
        if len(calls) > works:
            raise OSError(28, "No space left on device")
        return function(*arguments, **more)

    monkeypatch.setattr(os, name, fails_later)
