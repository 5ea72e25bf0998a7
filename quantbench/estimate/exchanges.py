"""Seconds in which the ranks of a model exchange numbers: sums and gathers, by their size.

    ring_seconds("all_reduce", 8192, ranks=8, link=sheet.link_among(8))     # on a card by its sheet

Bytes are those of one rank's tensor. On cards the model is NCCL's own, by which it chooses among
its algorithms (https://github.com/NVIDIA/nccl, src/graph/tuning.cc, of June 2026): a fixed time, a
time for each step around a ring, and the bytes that each rank sends over its link. Its protocol for
short messages sends as many bytes of flags as of numbers, so that it has half of the bandwidth.
Nothing of this was measured here.
"""

from dataclasses import dataclass

from quantbench.estimate.datasheets import Link


@dataclass(frozen=True)
class Protocol:
    """One of NCCL's ways to send numbers around a ring. Seconds are NCCL's figures."""

    once: float
    nvlink: float  # for each step of the ring
    pcie: float
    share: float  # of the link's bandwidth that numbers have


PROTOCOLS = (
    Protocol(6.6e-6, 0.6e-6, 1.0e-6, 0.5),  # LL: every 4 bytes with 4 bytes of flags
    Protocol(8.4e-6, 3.4e-6, 5.7e-6, 1.0),  # Simple: chunks, and a wait for each
)


def ring_steps(kind: str, ranks: int) -> int:
    """Steps around the ring. A sum goes around twice: to add up, and to tell every rank."""
    return (2 if kind == "all_reduce" else 1) * (ranks - 1)


def ring_bytes(kind: str, size: int, ranks: int) -> float:
    """Bytes that each rank sends. size: of one rank's tensor; a sum sends it in parts."""
    steps = ring_steps(kind, ranks)
    return steps * size / ranks if kind == "all_reduce" else steps * size


def ring_seconds(kind: str, size: int, ranks: int, link: Link) -> float:
    """Seconds of one call, by the faster protocol."""
    steps, sent = ring_steps(kind, ranks), ring_bytes(kind, size, ranks)
    return min(
        one.once
        + steps * (one.nvlink if link.nvlink else one.pcie)
        + sent / (one.share * link.rate)
        for one in PROTOCOLS
    )
