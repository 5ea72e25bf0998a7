"""What fits into a memory: schemes, caches, and how many positions.

for one in what_fits_into(request, machine, 24e9, ["none", "int8wo"], ["dense", "int8"]):
    print(one.scheme, one.kv_cache, one.positions)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from errors import KernelError
from estimate.predict import Machine, Request


@dataclass(frozen=True)
class Fit:
    """How many positions fit into a memory, for one scheme and kind of cache. Bytes are those of
    one device; on a processor of all ranks."""

    scheme: str
    kv_cache: str
    weights: int
    position: float  # of the cache per position, all sequences
    activations: int
    positions: int  # of each sequence; 0: not even the weights and one pass
    why_not: str | None = None  # why the scheme does not take the model


def what_fits_into(
    request: Request, machine: Machine, memory: float, schemes: Sequence[str], caches: Sequence[str]
) -> list[Fit]:
    """For each scheme and cache, the positions of all sequences that fit into `memory` bytes."""
    fits = []
    for scheme in schemes:
        for cache in caches:
            some = replace(
                request, scheme=scheme, kv_cache=cache, new_tokens=max(1, request.new_tokens)
            )
            try:
                taken = machine.memory(some, "prompt")
            except KernelError as error:
                fits.append(Fit(scheme, cache, 0, 0.0, 0, 0, str(error)))
                continue
            position = taken.kv_cache / some.positions
            left = memory - (taken.total - taken.kv_cache)
            positions = max(0, int(left // position)) if position else 0
            fits.append(Fit(scheme, cache, taken.weights, position, taken.activations, positions))
    return fits
