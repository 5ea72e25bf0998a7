"""What a worker of latencies answers (compare/sampling/latency_worker.py), typed; without torch."""

from dataclasses import dataclass

from quantbench.compare.figures.latency import LatencySample
from quantbench.compare.sampling.latency_results import ModelFacts
from quantbench.run.energy import Energy, NotCounted


@dataclass(frozen=True)
class Refusal:
    """A cell that cannot be measured, as its sizes tell beforehand."""

    sequence_length: int
    batch_size: int
    reason: str


@dataclass(frozen=True)
class Described:
    """What is known before weights are read."""

    model: ModelFacts
    refusals: list[Refusal]


@dataclass(frozen=True)
class Possible:
    """Consequences to warn of, a line each."""

    warnings: list[str]


@dataclass(frozen=True)
class CellReady:
    """A cell whose caches are there, and whose steps are compiled if they are to be."""

    decoder: str  # of run/decoding.py
    compiled: bool  # whether something was compiled for it; else it takes what another cell left
    compile_seconds: float  # for the first steps, which compile; 0 where nothing may be compiled
    estimate: dict[str, float] | None = None  # of the cell


@dataclass(frozen=True)
class Runs:
    """Some runs of a cell."""

    samples: list[LatencySample]
    energy: Energy | NotCounted | None = None  # of a run; None: it was not asked for
