"""What fits into a memory: schemes, caches, and how many positions.

for one in what_fits_into(request, machine, 24e9, ["none", "int8wo"], ["dense", "int8"]):
    print(one.scheme, one.kv_cache, one.positions)
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from devices import prefill_chunk
from errors import KernelError
from estimate.predict import Machine, Memory, Request


@dataclass(frozen=True)
class Fit:
    """How many positions fit into a memory, for one scheme and kind of cache. Bytes are those of
    one device; on a processor of all ranks."""

    scheme: str
    kv_cache: str
    weights: int
    position: float  # of the cache per position, all sequences
    activations: int  # of a prompt of as many positions
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
        for cache in caches:
            some = replace(request, scheme=scheme, kv_cache=cache)
            try:
                fits.append(_fit(some, machine, memory, context))
            except KernelError as error:
                fits.append(Fit(scheme, cache, 0, 0.0, 0, 0, str(error)))
    return fits


def _fit(request: Request, machine: Machine, memory: float, context: int | None) -> Fit:
    """A prompt of two passes has alive what one of more has, and beyond it a position takes its
    part of the cache alone, up to the window of a model that has one. Shorter prompts are searched.
    """
    chunk = prefill_chunk(machine.device, request.batch)
    longest = min(2 * chunk, context or 2 * chunk)
    config = request.config
    window = None if isinstance(config, str) else config.sliding_window

    def taken_by(prompt: int) -> Memory:
        return machine.memory(_prompt_of(request, prompt), "prompt")

    taken, positions = taken_by(longest), longest
    if taken.total > memory:
        positions = bisect.bisect_right(range(1, longest), memory, key=lambda p: taken_by(p).total)
        taken = taken_by(max(1, positions))
    position = taken.kv_cache / max(1, min(positions, window or positions))
    if positions == longest:
        positions += int((memory - taken.total) // position)
        if window is not None and positions >= window:
            positions = context or positions
    positions = min(positions, context or positions)
    return Fit(
        request.scheme, request.kv_cache, taken.weights, position, taken.activations, positions
    )


def _prompt_of(request: Request, prompt: int) -> Request:
    """A run of a prompt that fills its cache."""
    return replace(request, prompt=prompt, depth=0, new_tokens=0, cache_size=prompt)
