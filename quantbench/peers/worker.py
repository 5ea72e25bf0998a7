"""Another program in a process of its own, as bench/worker.py is for ours.

    python -m quantbench.peers.worker       # one JSON object a line in, one a line out

    {"do": "load", "argv": ["{\"runtime\": \"transformers\", \"file\": \"model.gguf\", …}"]}
    {"do": "get_ready"}
    {"do": "sample", "index": 3}
    {"do": "turn", "kind": "decode", "tokens": 8}

Each program has its own process because libraries compete for threads; while others are measured it
waits for its input and takes no processor time. Every one reads a prompt and then takes the
likeliest token, again and again; we time the same work that generate.py does.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import torch

from quantbench import devices
from quantbench.bench.answers import ArmFacts, TimedSample, TurnTime
from quantbench.bench.worker import serve
from quantbench.cli import quiet
from quantbench.environment import without_collections
from quantbench.errors import UsageError
from quantbench.peers import gguf_file
from quantbench.peers.arms import PeerWork, missing
from quantbench.peers.runtimes import RUNTIMES, Runtime
from quantbench.run.facts import Sample, WarmUp
from quantbench.run.measure import warm_up
from quantbench.typed_json import from_json


class PeerWorker:
    """Answers a comparison as bench/worker.py's Worker does."""

    runtime: Runtime

    def write_file(self, path: str, checkpoint: str, form: str, num_layers: int | None) -> None:
        """The checkpoint as a GGUF, whole or not at all."""
        gguf_file.write(Path(path), checkpoint, form, num_layers)

    def load(
        self, argv: list[str], saved: str | None = None, headroom: int = 0, others: int = 0
    ) -> None:
        """Load the model, if `headroom` bytes stay free. argv: a Work as JSON, alone. saved: not
        used. others: bytes that unloading the other arms would free."""
        quiet(False)
        self.work = work = from_json(PeerWork, json.loads(argv[0]))
        if work.file and work.form and not Path(work.file).exists():
            self.write_file(work.file, work.checkpoint, work.form, work.num_layers)
        try:
            self.runtime = RUNTIMES[work.runtime](work, headroom)
        except ImportError:
            raise UsageError(missing(work.runtime)) from None
        drawn = random.Random(work.seed)
        self.runtime.tokens = [drawn.randrange(self.runtime.vocab) for _ in range(work.prompt)]

    def get_ready(self) -> ArmFacts:
        """Compile and warm up."""
        seconds, steady = warm_up(lambda index: self.sample(index).seconds)
        return ArmFacts(
            device=self.work.device,
            weight_bytes=self.runtime.weight_bytes,
            ready=WarmUp(None, seconds, steady),
            peak_memory_bytes={"warm_up": devices.peak_memory(torch.device(self.work.device))},
            about=self.runtime.about,
        )

    def sample(self, index: int) -> TimedSample:
        """Every sample does the same work, whatever its index."""
        prompt, new = self.work.prompt, self.work.new
        with without_collections():
            prefill, steps = self.runtime.prompt(), self.runtime.decode(new - 1)
        sample = Sample.of(prefill, math.fsum(steps), prompt, new)
        return TimedSample(**vars(sample), token_seconds=steps[1:])

    def turn(self, kind: str, tokens: int) -> TurnTime:
        """kind: prompt, or decode of `tokens` tokens, after one that does not count."""
        with without_collections():
            if kind == "prompt":
                return TurnTime(self.work.prompt, self.runtime.prompt())
            return TurnTime(tokens, math.fsum(self.runtime.decode(1 + tokens)[1:]))


if __name__ == "__main__":
    serve(PeerWorker())
