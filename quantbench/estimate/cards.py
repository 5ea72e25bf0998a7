"""A card that is not here: its data sheet, and the shares of it that measured runs reached.

    predict(request, card("NVIDIA L4"))
    predict(request, card("A100", runs("benchmarks.txt", "A100")))     # estimate/calibration.py

A product takes the longer of operations ÷ (share · peak) and bytes ÷ (share · bandwidth); all else
takes both, and each product and each attention the time of a call.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy.optimize import least_squares

from quantbench.errors import KernelError, QuantbenchError, UsageError
from quantbench.estimate.counting import Count, Work
from quantbench.estimate.datasheets import Datasheet, find
from quantbench.estimate.predict import Machine, Phase, Request, pass_of
from quantbench.quantize.spec import parse_scheme
from quantbench.text import counted

TILE = 256  # columns of a matrix that cards multiply together
# Seconds of a kernel in addition to its numbers, assumed: blocks start, first bytes arrive, and the
# last block ends alone.
CALL_SECONDS = 4e-6
ALIKE = 0.15  # cards whose peaks per watt differ by less are limited by power alike
# Deviations of log(estimated ÷ measured), assumed, where runs are of the card and scheme, or of
# the scheme on another card.
SAME_CARD, OTHER_CARD = 0.1, 0.15
PRIOR = 0.01  # weight of the A5000's shares in a fit: they fill in what the runs do not tell
LONG_PROMPT = 128  # tokens of all rows: fewer are bound by memory, as a step is


@dataclass(frozen=True)
class Efficiency:
    """Shares of a card's peak and bandwidth that passes reach."""

    arithmetic: float
    memory: float
    deviation: float  # of log(estimated ÷ measured)
    source: str
    card: str = "NVIDIA RTX A5000"  # that reached them

    @property
    def sentence(self) -> str:
        shares = f"{self.memory:.0%} of the bandwidth, {self.arithmetic:.0%} of the peak"
        return f"{shares}, {self.source}"

    def on(self, sheet: Datasheet) -> "Efficiency":
        """What another card reaches: bytes go by the bandwidth, and operations by the peak; or by
        the power limit, if that exceeds this card's by less than the peak does and both have about
        the same peak per watt: cards that are made alike clock down alike."""
        own = find(self.card)
        if sheet.name == own.name:
            return self
        other = replace(self, deviation=max(self.deviation, OTHER_CARD))
        peaks, watts = sheet.peak("float16") / own.peak("float16"), sheet.power / own.power
        if watts >= peaks or abs(peaks / watts - 1) >= ALIKE:
            return other
        source = f"{self.source}, products by the ratio of the power limits"
        return replace(other, arithmetic=self.arithmetic * watts / peaks, source=source)


# An NVIDIA RTX A5000, fitted to six published forward passes of 16 × 1024 tokens in float16. Each
# is within 5.2 % of what the others say (tests/estimate/test_published.py). None was quantized, and
# none a decoding step; the deviation is assumed.
A5000 = Efficiency(0.6793, 0.6545, 0.28, "as six published passes reached on an RTX A5000")


@dataclass(frozen=True)
class Run:
    """A measured run. Seconds; None where they are not known."""

    request: Request
    card: str  # its name in the data sheets
    whole: float | None = None
    prompt: float | None = None
    token: float | None = None
    source: str = ""  # the file, and how the card is known


@dataclass(frozen=True)
class Card(Machine):
    """A card by its data sheet, and by runs; without runs of a scheme by an A5000's shares."""

    sheet: Datasheet
    runs: Sequence[Run] = ()
    fitted: dict[tuple[Run, ...], Efficiency] = field(default_factory=dict)

    def phases(self, request: Request) -> tuple[Phase, Phase]:
        efficiency = self.efficiency(request)
        prompt, token = (self.phase(request, count, efficiency) for count in self.counts(request))
        return prompt, token

    def counts(self, request: Request) -> tuple[Count, Count]:
        """The prompt's pass, and a step in the middle of the new tokens."""
        middle = request.depth + request.prompt + request.new_tokens // 2
        return (
            pass_of(request, self.device, request.prompt, request.depth, request.positions),
            pass_of(request, self.device, 1, middle),
        )

    def efficiency(self, request: Request) -> Efficiency:
        """By the runs of the scheme: on this card if there are any, else on the card that has the
        most; of the same model alone if there are any. Raises QuantbenchError for runs that read
        more than the card can."""
        own = [run for run in self.runs if run.request.scheme == request.scheme]
        cards = Counter(run.card for run in own)
        chosen = max(cards, key=lambda card: (card == self.name, cards[card]), default="")
        own = [run for run in own if run.card == chosen]
        same = [run for run in own if run.request.config == request.config]
        if not own:
            return A5000.on(self.sheet)
        key = tuple(same or own)
        if key not in self.fitted:
            self.fitted[key] = _fitted(key)
        return self.fitted[key].on(self.sheet)

    def phase(self, request: Request, count: Count, efficiency: Efficiency) -> Phase:
        """Seconds of a pass, and whether operations, bytes or exchanges take most of them."""
        parts = dict.fromkeys(("linear", "attention", "rest"), 0.0)
        bounds = {"arithmetic": 0.0, "memory's bandwidth": 0.0}
        spec = parse_scheme(request.scheme)
        for work, calls in count.works.items():
            numbers = spec.multiplied if work.format == str(spec) else None
            peak = self.sheet.peak(numbers or request.precision)
            arithmetic = calls * _operations(work) / (efficiency.arithmetic * peak)
            moved = calls * (work.bytes_read + work.bytes_written)
            memory = moved / (efficiency.memory * self.sheet.bandwidth)
            is_product = work.kind == "linear"
            parts[work.kind] += max(arithmetic, memory) if is_product else arithmetic + memory
            parts[work.kind] += 0.0 if work.kind == "rest" else calls * CALL_SECONDS
            bounds["arithmetic"] += arithmetic
            bounds["memory's bandwidth"] += memory
        if count.collectives:
            link = self.sheet.link_among(request.tp)
            parts["links"] = bounds["the links between devices"] = sum(
                calls * link.ring_seconds(one.kind, one.bytes, request.tp)
                for one, calls in count.collectives.items()
            )
        bound = max(bounds, key=lambda name: bounds[name])
        source = f"{self.source}; assumed: {efficiency.sentence}"
        return Phase(parts, bound, source, efficiency.deviation)


def _operations(work: Work) -> float:
    """A card multiplies whole tiles of columns: a part takes the time of a whole one."""
    if work.kind != "linear" or not work.outer:
        return work.flops
    return work.flops * (-(-work.outer // TILE) * TILE / work.outer)


def _fitted(runs: Sequence[Run]) -> Efficiency:
    """The shares with which runs on one card take the seconds that were measured."""
    where, cases = card(runs[0].card), []
    for run in runs:
        try:
            cases.append((run, where.counts(run.request)))
        except (KernelError, UsageError):  # a model that the scheme or the ranks do not take
            continue
    start = np.log([A5000.arithmetic, A5000.memory])

    def errors(shares: np.ndarray) -> list[float]:
        own = replace(A5000, arithmetic=math.exp(shares[0]), memory=math.exp(shares[1]))
        found = list(PRIOR * (shares - start))
        for run, counts in cases:
            prompt, token = (where.phase(run.request, count, own).seconds for count in counts)
            whole = prompt + max(0, run.request.new_tokens - 1) * token
            pairs = (prompt, run.prompt), (token, run.token), (whole, run.whole)
            found += [math.log(seconds / known) for seconds, known in pairs if known]
        return found

    fit = least_squares(errors, start, bounds=(math.log(1e-3), math.log(1e2)))
    arithmetic, memory = np.exp(fit.x)
    name, said = where.name, f"{counted(len(cases), 'run')} of {runs[0].source}"
    if not cases:
        return A5000
    if memory > 1.05:
        raise QuantbenchError(
            f"--calibration: {said} would have read {memory:.2g} times the bandwidth of {name}: "
            "they ran on another card; name it as --calibrated_on"
        )
    source = f"as in {said}"
    if not any(r.request.batch * r.request.prompt >= LONG_PROMPT for r, _ in cases):
        source += f"; products {A5000.source}"
    deviation = math.hypot(SAME_CARD, float(np.sqrt(np.mean(np.square(fit.fun[2:])))))
    return Efficiency(float(arithmetic), float(memory), deviation, source, name)


def card(name: str, runs: Sequence[Run] = ()) -> Card:
    """Raises UsageError for a card that has no data sheet here."""
    sheet = find(name)
    source = f"not measured: data sheet ({sheet.source})"
    cuda = torch.device("cuda")
    return Card(sheet.name, source, cuda, sheet.power, sheet.memory, sheet, runs)
