"""What fits into a memory: schemes, caches, and how many positions.

for one in what_fits_into(request, machine, 24e9, ["none", "int8wo"], ["dense", "int8"]):
    print(one.scheme, one.kv_cache, one.positions)
"""

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from quantbench.devices import prefill_chunk
from quantbench.errors import KernelError
from quantbench.estimate.predict import Machine, Memory, Request
from quantbench.kv_cache import CACHES
from quantbench.run.sizes import kv_cache_bytes, state_bytes

MOST = 1 << 40  # positions, of a model that has no limit


@dataclass(frozen=True)
class Fit:
    """How many positions fit into a memory, for one scheme and kind of cache. Bytes are those of
    one device; on a processor of all ranks."""

    scheme: str
    kv_cache: str
    weights: int
    position: float  # of the cache per position, all sequences
    activations: int  # of a prompt that fills these positions
    positions: int  # of each sequence, at most the model's; 0: not even the weights and one pass
    why_not: str | None = None  # why the scheme does not take the model


def what_fits_into(
    request: Request,
    machine: Machine,
    memory: float,
    schemes: Sequence[str],
    caches: Sequence[str],
    context: int | None = None,
    report: Callable[[int, int], object] = lambda done, total: None,
) -> list[Fit]:
    """For each scheme and cache, the positions of all sequences that fit into `memory` bytes, if a
    prompt fills them. context: positions of the model, of which no more are named; None: no limit.
    report(done, total) is told of schemes.
    """
    fits = []
    for done, scheme in enumerate(schemes):
        report(done, len(schemes))
        taken_by = functools.cache(partial(_taken_by, replace(request, scheme=scheme), machine))
        for cache in caches:
            some = replace(request, scheme=scheme, kv_cache=cache)
            try:
                fits.append(_fit(some, machine, taken_by, memory, context))
            except KernelError as error:
                fits.append(Fit(scheme, cache, 0, 0.0, 0, 0, str(error)))
    return fits


def _taken_by(request: Request, machine: Machine, prompt: int) -> Memory:
    """What a prompt takes that fills its cache, a dense one."""
    run = replace(request, prompt=prompt, depth=0, new_tokens=0, cache_size=prompt)
    return machine.memory(replace(run, kv_cache="dense"), "prompt")


def _fit(
    request: Request,
    machine: Machine,
    taken_by: Callable[[int], Memory],
    memory: float,
    context: int | None,
) -> Fit:
    """taken_by: what a prompt takes with a dense cache, counted once for all kinds of caches.

    A prompt of two passes has alive what one of more has: beyond it a position takes its part of
    the cache alone, and none behind a window.
    """
    passes = 2 * prefill_chunk(machine.device, request.batch)
    longest = min(passes, context or passes)
    taken_by(longest)  # which refuses a model of transformers
    assert not isinstance(request.config, str)
    window = None if request.config.full_layers else request.config.sliding_window

    def taken(prompt: int) -> Memory:
        """All kinds of caches are multiplied by the same number of ranks."""
        counted = min(prompt, longest)
        dense = taken_by(counted)
        cache = dense.kv_cache * _cache(request, prompt) // _cache(request, counted, "dense")
        return replace(dense, kv_cache=cache)

    prompts = range(1, (context or MOST) + 1)
    # Most memories hold all of two passes, or nothing: that takes one count or two.
    low = longest if taken(longest).total <= memory else 0
    high = len(prompts) if taken(1).total <= memory else low
    positions = bisect_right(prompts, memory, low, high, key=lambda prompt: taken(prompt).total)
    at = taken(max(1, positions))
    states = state_bytes(request.config, request.batch, getattr(torch, request.precision))
    position = (at.kv_cache - states) / max(1, min(positions, window or positions))
    return Fit(request.scheme, request.kv_cache, at.weights, position, at.activations, positions)


def _cache(request: Request, positions: int, kind: str | None = None) -> int:
    """Bytes of a cache of this kind, or of the request's."""
    assert not isinstance(request.config, str)
    precision: torch.dtype = getattr(torch, request.precision)
    kept = CACHES[kind or request.kv_cache]
    return kv_cache_bytes(request.config, request.batch, positions, precision, kept)
