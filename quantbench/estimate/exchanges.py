"""Seconds in which the ranks of a model exchange numbers: sums and gathers, by their size.

    ring_seconds("all_reduce", 8192, ranks=8, link=sheet.link_among(8))     # on a card by its sheet
    Exchanges(calibration.exchanges).seconds("all_reduce", 8192, ranks=2)   # as it was measured

Bytes are those of one rank's tensor. On cards the model is NCCL's own, by which it chooses among
its algorithms (https://github.com/NVIDIA/nccl, src/graph/tuning.cc, of June 2026): a fixed time, a
time for each step around a ring, and the bytes that each rank sends over its link. Its protocol for
short messages sends as many bytes of flags as of numbers, so that it has half of the bandwidth.
Nothing of this was measured here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from quantbench.errors import UsageError
from quantbench.estimate.calibration import ExchangePoint
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


class Exchanges:
    """What was measured by size, between ranks on one machine: seconds = call + bytes sent ÷ rate,
    for each kind. Calls of more ranks than were measured take as many times longer as they have
    steps."""

    def __init__(self, points: Sequence[ExchangePoint]) -> None:
        self.fits: dict[str, tuple[float, float, int]] = {}
        for kind in dict.fromkeys(point.kind for point in points):
            own = [point for point in points if point.kind == kind]
            ranks = own[0].ranks
            terms = np.array([[1.0, ring_bytes(kind, p.bytes, ranks)] for p in own])
            seconds = np.array([point.seconds for point in own])
            relative = terms / seconds[:, None]
            scale = relative.max(0)
            (call, byte), _ = nnls(relative / scale, np.ones(len(own)))
            self.fits[kind] = float(call / scale[0]), float(byte / scale[1]), ranks

    def seconds(self, kind: str, size: int, ranks: int) -> float:
        """Seconds of one call. Raises UsageError where exchanges of this kind were not measured."""
        if kind not in self.fits:
            raise UsageError(
                f"--tp {ranks}: the calibration is of one process; `quantbench calibrate` of this "
                "version measures what ranks exchange, too"
            )
        call, byte, measured = self.fits[kind]
        steps = ring_steps(kind, ranks) / ring_steps(kind, measured)
        return call * steps + byte * ring_bytes(kind, size, ranks)
