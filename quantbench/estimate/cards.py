"""A card that is not here: its data sheet, and the shares of it that measured runs reached.

    predict(request, card("NVIDIA L4"))
    predict(request, card("A100", of_file("benchmarks.txt", "A100")))     # estimate/calibration.py

A product takes the longer of operations ÷ (share · peak) and bytes ÷ (share · bandwidth); all else
takes both, and each product and each attention the time of a call.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from quantbench.estimate.counting import Count, Work
from quantbench.estimate.datasheets import Datasheet, find
from quantbench.estimate.exchanges import ring_seconds
from quantbench.estimate.predict import Machine, Phase, Request, pass_of
from quantbench.quantize.spec import parse_scheme

TILE = 256  # columns of a matrix that cards multiply together
# Seconds of a kernel besides its numbers, assumed: blocks are started, first bytes arrive, and the
# last block ends alone.
CALL_SECONDS = 4e-6
ALIKE = 0.15  # cards whose peaks per watt differ by less are limited by power alike


@dataclass(frozen=True)
class Efficiency:
    """Shares of a card's peak and bandwidth that passes reach."""

    arithmetic: float
    memory: float
    deviation: float  # of log(estimated ÷ measured)
    source: str

    @property
    def sentence(self) -> str:
        shares = f"{self.memory:.0%} of the bandwidth, {self.arithmetic:.0%} of the peak"
        return f"{shares}, {self.source}"


# An NVIDIA RTX A5000, fitted to six published forward passes of 16 × 1024 tokens in float16. Each
# is within 5.2 % of what the others say (tests/estimate/test_published.py). None was quantized, and
# none a decoding step; the deviation is assumed.
A5000 = Efficiency(0.6793, 0.6545, 0.28, "as six published passes reached on an RTX A5000")


@dataclass(frozen=True)
class Card(Machine):
    """A card by its data sheet. efficiencies: by scheme, of measured runs; those of an A5000 for
    others."""

    sheet: Datasheet
    efficiencies: Mapping[str, Efficiency] = field(default_factory=dict)

    def phases(self, request: Request) -> tuple[Phase, Phase]:
        efficiency = self.efficiency(request.scheme)
        prompt, token = (self.phase(request, count, efficiency) for count in self.counts(request))
        return prompt, token

    def counts(self, request: Request) -> tuple[Count, Count]:
        """The prompt's pass, and a step in the middle of the new tokens."""
        middle = request.depth + request.prompt + request.new_tokens // 2
        return (
            pass_of(request, self.device, request.prompt, request.depth, request.positions),
            pass_of(request, self.device, 1, middle),
        )

    def efficiency(self, scheme: str) -> Efficiency:
        """The A5000's share of the peak goes by the power limit on a card that has about the same
        peak per watt, and a limit that exceeds the A5000's by less than its peak does: cards that
        are made alike clock down alike.
        """
        if scheme in self.efficiencies:
            return self.efficiencies[scheme]
        own, sheet = find("NVIDIA RTX A5000"), self.sheet
        peaks, watts = sheet.peak("float16") / own.peak("float16"), sheet.power / own.power
        if watts >= peaks or abs(peaks / watts - 1) >= ALIKE:
            return A5000
        source = f"{A5000.source}, products by the ratio of the power limits"
        return replace(A5000, arithmetic=A5000.arithmetic * watts / peaks, source=source)

    def phase(self, request: Request, count: Count, efficiency: Efficiency) -> Phase:
        """Seconds of a pass, and whether operations, bytes or exchanges take most of them."""
        parts = dict.fromkeys(("linear", "attention", "rest"), 0.0)
        bounds = {"arithmetic": 0.0, "memory's bandwidth": 0.0}
        spec = parse_scheme(request.scheme)
        for work in count.works:
            numbers = spec.multiplied if work.format == str(spec) else None
            peak = self.sheet.peak(numbers or request.precision)
            arithmetic = _operations(work) / (efficiency.arithmetic * peak)
            moved = work.bytes_read + work.bytes_written
            memory = moved / (efficiency.memory * self.sheet.bandwidth)
            is_product = work.kind == "linear"
            parts[work.kind] += max(arithmetic, memory) if is_product else arithmetic + memory
            parts[work.kind] += 0.0 if work.kind == "rest" else work.calls * CALL_SECONDS
            bounds["arithmetic"] += arithmetic
            bounds["memory's bandwidth"] += memory
        if count.collectives:
            link = self.sheet.link_among(request.tp)
            parts["links"] = bounds["the links between devices"] = sum(
                one.calls * ring_seconds(one.kind, one.bytes, request.tp, link)
                for one in count.collectives
            )
        bound = max(bounds, key=lambda name: bounds[name])
        source = f"{self.source}; assumed: {efficiency.sentence}"
        return Phase(parts, bound, source, efficiency.deviation)


def _operations(work: Work) -> float:
    """Whole tiles of columns are multiplied: a part of one takes as long."""
    if work.kind != "linear" or not work.outer:
        return work.flops
    return work.flops * (-(-work.outer // TILE) * TILE / work.outer)


def card(name: str, efficiencies: Mapping[str, Efficiency] | None = None) -> Card:
    """Raises UsageError for a card that has no data sheet here."""
    sheet = find(name)
    source = f"not measured: data sheet ({sheet.source})"
    cuda = torch.device("cuda")
    return Card(sheet.name, source, cuda, sheet.power, sheet.memory, sheet, efficiencies or {})
