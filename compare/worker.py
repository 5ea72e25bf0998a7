"""One arm in a process of its own: it loads a model, warms up, and then samples when it is told to.

    python -m compare.worker        # one JSON object a line in, one a line out

    {"do": "load", "argv": ["--quantization", "int8wo"], "warm_up": true}
    {"do": "sample", "index": 3}
    {"do": "quality", "tokens": 1024, "text": null, "reference": "logits.f32", "write": false}
    {"do": "bandwidth", "device": "cpu"}

Each is answered by {"did": …} or, in one line, {"failed": why}; {"say": …} may come before that.
Between requests it waits for its input and burns nothing; at the end of its input, as when whoever
started it is gone, it ends at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import generate
from benchlog.config import parse

if TYPE_CHECKING:
    from session import Session




class Worker:
    """What has been loaded so far, and what each request does."""

    def __init__(self) -> None:
        self.plan: generate.Plan
        self.model: Any = None
        self.session: Session
        self.bandwidth_probe: Any = None

    def load(self, argv: list[str], warm_up: bool = True) -> dict[str, Any]:
        """Load and, if asked, compile and warm up; everything known before the first sample."""
        import torch

        import devices
        import sizes

        config = parse(argv)
        generate.quiet(config.debug)
        generate.parse(config.quantization)
        self.plan = plan = generate.make_plan(config)
        self.model, loading = generate.load(plan, lambda done, total: None)
        self.prompt = torch.tensor([plan.prompt] * config.batch_size, device=plan.device)
        facts: dict[str, Any] = {
            "config": dataclasses.asdict(plan.config),
            "model": plan.name,
            "scheme": str(plan.spec),
            "kernel": plan.loading.kernels,
            "weight_bytes": self.model.weight_bytes(),
            "prompt_tokens": len(plan.prompt),
            "cache_size": plan.cache_size,
            "kv_cache": sizes.kv_cache(config).format,
            "peak_memory_bytes": {"load": loading},
            "device": {"type": plan.device.type, **devices.describe(plan.device)},
            "versions": generate.versions(),
            "git_commit": generate.git_commit(),
        }
        if warm_up:
            facts |= self._warm_up(facts["peak_memory_bytes"])
        return facts

    def _warm_up(self, memory: dict[str, Any]) -> dict[str, Any]:
        import devices

        config, device = self.plan.config, self.plan.device
        self.session = generate.make_session(self.plan, self.model)
        devices.reset_peak_memory(device)
        started = time.perf_counter()
        self.session.generate(self.prompt, min(3, config.max_new_tokens))
        first = time.perf_counter() - started
        seconds, steady = generate.warm_up(lambda index: self._generate(index, lambda: None))
        memory["warm_up"] = devices.peak_memory(device)
        devices.reset_peak_memory(device)
        return {
            "kv_cache_bytes": sum(cache.nbytes for cache in self.model.caches),
            "first_seconds": first,
            "warm_ups": seconds,
            "warm_up_steady": steady,
        }

    def _generate(self, index: int, after_token: Callable[[], object]) -> Any:
        import torch

        # The same seed in every arm: what is drawn differs only where the models do.
        torch.manual_seed(self.plan.config.seed + index)
        return self.session.generate(self.prompt, self.plan.config.max_new_tokens, after_token)

    def sample(self, index: int) -> dict[str, Any]:
        """One sample's figures, its decoding steps one by one, and the peak memory so far."""
        import devices
        from compare.clock import Clock

        clock = Clock(self.plan.device)
        generation = self._generate(index, clock.tick)
        return {
            **generate.figures(generation, len(self.plan.prompt)),
            "token_seconds": clock.intervals(),
            "peak_memory_bytes": devices.peak_memory(self.plan.device),
        }

    def quality(self, tokens: int, text: str | None, reference: str, write: bool) -> dict[str, Any]:
        """Perplexity, and how far the next-token distributions are from the baseline's."""
        from compare.fidelity import measure

        return measure(self.plan, self.model, tokens, text, reference, write)

    def bandwidth(self, device: str) -> dict[str, Any]:
        import devices
        from compare.bandwidth import Bandwidth

        if self.bandwidth_probe is None:
            self.bandwidth_probe = Bandwidth(devices.resolve(device))
        return {"bytes_per_s": self.bandwidth_probe.measure()}


def serve(worker: Worker) -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not come between the answers
    requests: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(json.loads(line))
        os._exit(0)  # even in the middle of a sample: nobody waits for it any more

    threading.Thread(target=read, daemon=True).start()

    while True:
        request = requests.get()
        try:
            answer = {"did": getattr(worker, request.pop("do"))(**request)}
        except (Exception, KeyboardInterrupt) as error:
            answer = {"failed": " ".join(generate.explained(error)[0].split())}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    serve(Worker())
