"""One arm in a process of its own: it loads a model, warms up, and takes a sample when asked.

    python -m quantbench.bench.worker        # one JSON object a line in, one a line out

    {"do": "load", "argv": ["--quantization", "int8wo"], "saved": null, "headroom": 0, "others": 0}
    {"do": "divergence", "judged": {"ids": [1, 5], "tokens": [[5, 7], [9, 3]], "logs": …}}
    {"do": "get_ready"}
    {"do": "sample", "index": 3}
    {"do": "turn", "kind": "decode", "tokens": 8}
    {"do": "cell", "prompt": 100, "rows": 2, "new_tokens": 8, "most_rows": 32}   # of latency

    {"do": "read", "argv": ["--quantization", "none"], "tokens": 2048, "text": null}    # a judge
    {"do": "judge", "argv": ["--quantization", "int8wo"], "max_kl": 0.03, "seconds": 10}

Each is answered by {"did": …} or {"failed": why, "kind": memory, usage, refused or other}.
A request is a method of Worker or a name in WITHOUT_A_MODEL; arguments and answers are JSON of the
types in its signature (bench/answers.py). Between requests the worker waits for its input and takes
no processor time; at the end of its input, as when the coordinator has ended, it exits at once.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import pkgutil
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from quantbench import devices, environment, generate
from quantbench.bench import ranks
from quantbench.bench.answers import ArmFacts, Reading, Runnable, TimedSample, TurnTime
from quantbench.bench.generators import Generators
from quantbench.cli import explained, quiet
from quantbench.errors import KernelError, MemoryShortage, QuantbenchError, UsageError
from quantbench.log.options import parse
from quantbench.progress import say
from quantbench.quality.types import Judged, Likeliest, NoQuality
from quantbench.quantize.registry import available
from quantbench.run import checks, measure, saved_model, sizes
from quantbench.run import plan as planning
from quantbench.run.bandwidth import PARTS, reader
from quantbench.run.energy import Energy, NotCounted, meter
from quantbench.run.facts import Facts, Peaks, WarmUp
from quantbench.run.turns import DecodingTurns
from quantbench.typed_json import from_json, to_json

if TYPE_CHECKING:
    from quantbench.quality.judge import Judge

WITHOUT_A_MODEL = {  # requests, and the functions that answer them
    "same_model": "quantbench.quality.same_model:same_model",
    "products": "quantbench.bench.layer_timing:products",
}
LEAST_STEPS = 4  # that compile: CUDA graphs are captured in the second call, and replayed after it


class NeverFits(QuantbenchError):
    """There is no room for the arm even alone."""


class Worker:
    """What is loaded, and a method for each request."""

    generators: Generators | None = None  # of the cells of latency
    judging: Judge | None = None  # bench/judging.py

    def load(
        self, argv: list[str], saved: str | None = None, headroom: int = 0, others: int = 0
    ) -> None:
        """Load the model, if `headroom` bytes stay free.

        saved: the folder in which the quantized model is kept for the arm's next processes.

        Raises MemoryShortage where they would not, NeverFits where freeing the `others` bytes that
        the other arms hold would not be enough either.
        """
        self.seconds = {"import": _age()}  # of the process, by phase of its start
        config = parse(argv)
        quiet(config.debug)
        started = time.perf_counter()
        self.plan = plan = planning.begin(planning.make_plan(config))
        free = devices.free_memory(plan.device)
        if free is not None:
            try:
                sizes.fits(plan, max(0, free - headroom))
            except MemoryShortage:
                try:
                    sizes.fits(plan, free + others)
                except MemoryShortage as error:
                    raise NeverFits(str(error)) from None
                raise
        plan.ranks.meet()  # or a late rank would find less memory free
        folder = Path(saved) if saved else None
        self.loaded = saved_model.load(plan, folder, lambda done, total: None, say)
        quantizing = self.loaded.quantize_seconds
        self.seconds["load"] = time.perf_counter() - started - quantizing
        self.seconds["quantize"] = quantizing

    def read(self, argv: list[str], tokens: int, text: str | None) -> Judged:
        """Be the judge: let full precision read the first look, and return its own quality."""
        from quantbench.quality.judge import EMBEDDED_MODEL, Held, Judge, quietly, standing_in

        plan = planning.begin(planning.make_plan(parse(argv)))
        try:
            plan, stands_in = standing_in(plan)
        except (UsageError, KernelError) as error:
            return Judged(NoQuality(f"random weights, not on the model {EMBEDDED_MODEL}: {error}"))
        try:
            self.judging = Judge(Held(plan, quietly), text, tokens, stands_in)
        except UsageError as error:
            return Judged(NoQuality(str(error)), refused=str(error))
        return self.judging.own()

    def judge(self, argv: list[str], max_kl: float, seconds: float, details: bool) -> Judged:
        """An arm's quality: see quality/judge.py."""
        config = parse(argv)
        quiet(config.debug)
        assert self.judging
        plan = planning.begin(planning.make_plan(config, self.judging.exact.plan))
        return self.judging.judged(plan, max_kl, seconds, details)

    def divergence(self, judged: Likeliest) -> float:
        """KL of the loaded model from the one that was judged, nats a token."""
        from quantbench.quality import decode_check

        with devices.returning_memory():  # else it would raise the peak of generating
            found = decode_check.divergence(self.plan, self.loaded.model, judged)
            gc.collect()  # reference cycles hold models: up to 10 MB, which would count as peak
        return found

    def get_ready(self) -> ArmFacts:
        """Compile, warm up, and count the energy of a sample."""
        started = time.perf_counter()
        plan, device = self.plan, self.plan.device
        generator = generate.make_generator(plan, self.loaded.model)
        self.one_sample = measure.Sampler(plan, generator)
        self.turns = DecodingTurns(plan, generator)
        ready = measure.get_ready(self.one_sample)
        warm_up = sum(ready.warm_ups)
        self.seconds["compile"] = time.perf_counter() - started - warm_up
        self.seconds["warm_up"] = warm_up
        of_warm_up = devices.peak_memory(device)
        measure.check_logits(plan, generator)
        peaks = {
            "load": measure.of_all_ranks(plan, self.loaded.peak_memory),
            "warm_up": measure.of_all_ranks(plan, of_warm_up),
        }
        counting = time.perf_counter()
        counted = self._energy(lambda: self.one_sample(0))
        self.seconds["energy"] = time.perf_counter() - counting
        devices.reset_peak_memory(device)
        facts = measure.facts_of(plan, generator, self.loaded.kernels)
        seconds = {phase: round(value, 3) for phase, value in self.seconds.items()}
        arm = self._facts(facts, ready, peaks, counted)
        return dataclasses.replace(arm, start_seconds=[seconds])

    def _facts(
        self, run: Facts, ready: WarmUp, peaks: Peaks, energy: Energy | NotCounted
    ) -> ArmFacts:
        plan, scheme = self.plan, self.plan.spec.scheme
        return ArmFacts(
            device=run.config.device,
            weight_bytes=run.weight_bytes,
            peak_memory_bytes=peaks,
            ready=ready,
            run=run,
            kernels=available(scheme, plan.device, plan.precision) if scheme else {},
            energy=[energy],
            notes=list(plan.notes),
        )

    def _energy(self, run: Callable[[], object]) -> Energy | NotCounted:
        """The energy of a run. Those that are timed are not repeated for it: the other arms' would
        be further away from them."""
        return meter(self.plan.device, self.plan.ranks).energy(0, run)

    def sample(self, index: int) -> TimedSample:
        device = self.plan.device
        moments: list[Any] = []
        _, sample = self.one_sample(
            index, after_token=lambda: moments.append(devices.moment(device))
        )
        return TimedSample(
            **vars(dataclasses.replace(sample, experts=None)),
            token_seconds=[round(seconds, 7) for seconds in devices.intervals(moments)],
            peak_memory_bytes=measure.of_all_ranks(self.plan, devices.peak_memory(device)),
        )

    def turn(self, kind: str, tokens: int, each: bool = False) -> TurnTime:
        """kind: prompt, or decode of `tokens`. each: return the seconds of each step, too."""
        if kind == "prompt":
            return TurnTime(len(self.plan.prompt), self.turns.prompt())
        seconds = self.turns.decode(tokens)
        return TurnTime(tokens, seconds, self.turns.steps_taken if each else None)

    def cell(self, prompt: int, rows: int, new_tokens: int, most_rows: int) -> ArmFacts:
        """Make caches for prompts of so many random tokens and so many rows of the loaded model,
        in the place of the last cell's, and compile the steps. most_rows: the largest batch to
        come. Raises UsageError past the model's context, MemoryShortage where caches do not fit."""
        first = self.generators is None
        self.generators = self.generators or Generators(self.plan, self.loaded.model)
        plan, generator = self.generators.at(prompt, rows, new_tokens, most_rows)
        if first:
            measure.check_logits(plan, generator)
        self.plan, steps = plan, new_tokens - 1
        self.turns = turns = DecodingTurns(plan, generator)
        started = time.perf_counter()
        if generator.compiles:
            turns.prompt()
            for _ in range(math.ceil(LEAST_STEPS / steps)):
                turns.decode(steps)
        compiling = time.perf_counter() - started if generator.compiles else None
        facts = measure.facts_of(plan, generator, self.loaded.kernels)
        counted = self._energy(lambda: (turns.prompt(), turns.decode(steps)))
        peaks = {"load": measure.of_all_ranks(plan, self.loaded.peak_memory)}
        return self._facts(facts, WarmUp(compiling, [], False), peaks, counted)

    def bandwidth(self, device: str) -> Reading:
        probe = reader(device)
        parts = PARTS if probe.device.type == "cpu" else 1  # a card reads the block in 0.3 ms
        return Reading(probe.measure(parts), None, probe.probe, probe.caveat)

    def schemes(self, argv: list[str]) -> list[str]:
        """Every kind of scheme that has a kernel here."""
        from quantbench.run import runnable  # no run needs it

        return runnable.schemes(parse(argv))

    def plans(self, argvs: list[list[str]]) -> list[Runnable]:
        """Whether each run has its kernels, and fits into the memory that is free."""
        from quantbench.run import runnable  # no run needs it

        planned = []
        for argv in argvs:
            config = parse(argv)
            quiet(config.debug)
            try:
                if config.tp > 1:  # planned by its ranks alone
                    one = planning.make_plan(dataclasses.replace(config, tp=1))
                    planning.check_ranks(one, config.tp)
                    planned.append(Runnable())
                    continue
                checks.check(dataclasses.replace(config, write_result="none"))
                plan = planning.make_plan(config)
                sizes.fits(plan, devices.free_memory(plan.device))
                runnable.check(plan)
                planned.append(Runnable())
            except QuantbenchError as error:
                kind = "usage" if isinstance(error, UsageError) else "refused"
                planned.append(Runnable(str(error), kind))
        return planned


def _age() -> float:
    """Seconds since the process was started; 0 where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_bytes().split()[0])
        return max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def serve(worker: object) -> None:
    """Answer requests until there are no more, each by the worker's method of that name.

    In a process that is one of several ranks (bench/ranks.py), an error ends the rank.
    """
    environment.prepare()
    where = None if environment.is_torchrun() else environment.place()
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    requests: queue.Queue[dict[str, Any]] = queue.Queue()

    if where is not None:
        from quantbench.parallel import launch

        launch.end_with_launcher()

    def read() -> None:
        for line in sys.stdin:
            requests.put(json.loads(line))
        # The coordinator has ended: end at once, in the middle of a sample, with every compiler.
        if where is None and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        request = requests.get()
        try:
            answer = {"did": _carried_out(worker, **request)}
        except (Exception, KeyboardInterrupt) as error:
            reason, kind = explained(error)[0], _kind(error)
            if where is not None:
                ranks.fail(error, kind)
            answer = {"failed": " ".join(reason.split()), "kind": kind}
        if where is None or where.rank == 0:
            answers.write(json.dumps(answer) + "\n")


def _kind(error: BaseException) -> str:
    """See WorkerFailed."""
    short = isinstance(error, MemoryShortage) or explained(error)[0].startswith("out of memory")
    if short and not isinstance(error, NeverFits):
        return "memory"
    if isinstance(error, UsageError):
        return "usage"
    return "refused" if isinstance(error, QuantbenchError) else "other"


def _carried_out(worker: object, do: str, **arguments: object) -> Any:
    """The JSON of what the worker's method `do` returns for these arguments."""
    name = WITHOUT_A_MODEL.get(do)
    method = pkgutil.resolve_name(name) if name else getattr(worker, do)
    hints = get_type_hints(method)
    typed = {
        name: from_json(hints[name], value) if name in hints else value
        for name, value in arguments.items()
    }
    return to_json(method(**typed))


if __name__ == "__main__":
    serve(Worker())
