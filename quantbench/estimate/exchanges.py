"""Seconds in which the ranks of a model exchange numbers on cards: sums and gathers, by their size.

    ring_seconds("all_reduce", 8192, ranks=8, link=sheet.link_among(8))

The model is NCCL's own, by which it chooses among its algorithms
(https://github.com/NVIDIA/nccl, src/graph/tuning.cc, of June 2026): a fixed time, a time for each
step around a ring, and the bytes that each rank sends over its link. Nothing was measured here.
"""

from quantbench.estimate.datasheets import Link

# NCCL's seconds once, and for each step of the ring over NVLink and over PCIe; and the share of the
# link's bandwidth that numbers have.
PROTOCOLS = (
    (6.6e-6, 0.6e-6, 1.0e-6, 0.5),  # LL: every 4 bytes with 4 bytes of flags
    (8.4e-6, 3.4e-6, 5.7e-6, 1.0),  # Simple: chunks, and a wait for each
)


def ring_seconds(kind: str, size: int, ranks: int, link: Link) -> float:
    """Seconds of one call, by the faster protocol. size: bytes of one rank's tensor. A sum goes
    around the ring twice, to add up and to tell every rank, in parts of a rank's share."""
    steps = (2 if kind == "all_reduce" else 1) * (ranks - 1)
    sent = steps * size / (ranks if kind == "all_reduce" else 1)
    return min(
        once + steps * (nvlink if link.nvlink else pcie) + sent / (share * link.rate)
        for once, nvlink, pcie, share in PROTOCOLS
    )
