"""The worker of latency tables: it loads one model, and measures cells of it.

    python -m quantbench.compare.sampling.latency_worker   # requests as in sampling/worker.py

    {"do": "check", "argv": […], "ranks": [1, 2]}       # before anything is measured
    {"do": "describe", "argv": […], "cells": [[100, 1], [100, 2]], "decode_length": 8}
    {"do": "load"}
    {"do": "cell", "sequence_length": 100, "batch_size": 2}
    {"do": "runs", "count": 10, "seconds": 1.0, "metered": true}

A cell has a Generator of its own, with caches for its rows and positions. Cells of one sequence
length share one where steps are compiled: its caches have rows for the largest batch, so that what
was compiled for one batch size serves the others.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from typing import TYPE_CHECKING

from quantbench.bench.worker import serve
from quantbench.cli import quiet
from quantbench.compare.figures.latency import LatencySample
from quantbench.compare.sampling.latency_answers import (
    CellReady,
    Described,
    Possible,
    Refusal,
    Runs,
)
from quantbench.compare.sampling.latency_results import Carried, ModelFacts
from quantbench.errors import KernelError, MemoryShortage
from quantbench.log.about import machine
from quantbench.log.config import parse
from quantbench.run import launch
from quantbench.run.energy import Meter, NotCounted
from quantbench.text import size

if TYPE_CHECKING:
    from torch import Tensor

    from quantbench import generate
    from quantbench.models.config import ModelConfig
    from quantbench.models.llama import Transformer
    from quantbench.run.plan import Plan

LEAST_STEPS = 4  # that compile: CUDA graphs are captured in the second call, and replayed after it

ESTIMATE_SECONDS = 0.3  # of turns of the first layers, for each cell

Place = tuple[int, int]  # a cell: sequence length, batch size


class LatencyWorker:
    """What is loaded, and a method for each request."""

    plan: Plan
    cells: list[Place]  # the cells that can be measured, as far as sizes tell
    decode_length: int
    model: Transformer
    generator: generate.Generator | None = None
    length: int  # tokens of the generator's prompts
    shared: list[int]  # the batch sizes for which the generator is
    prompt: Tensor  # of the present cell, (B, S)
    kernels: str  # of the model's linear layers
    meter: Meter | NotCounted

    def check(self, argv: list[str], ranks: list[int]) -> Possible:
        """Whether the model can be shared by each number of ranks; UsageError where it cannot."""
        from quantbench import devices
        from quantbench.models.formats import open_checkpoint
        from quantbench.ops.ranks import Ranks
        from quantbench.quantize.spec import parse as parse_scheme
        from quantbench.run import parallel
        from quantbench.run.cutting import split_for
        from quantbench.run.plan import scheme_of

        config = parse(argv)
        checkpoint = open_checkpoint(config.checkpoint_path)
        spec = scheme_of(config, parse_scheme(config.quantization), checkpoint)
        architecture, device = checkpoint.config(), devices.resolve(config.device)
        layers = checkpoint.saved.layers if checkpoint.saved else None
        warnings: list[str | None] = []
        for number in ranks:
            if number > 1:
                where = launch.Place(0, number, 0, number)
                split_for(architecture, Ranks(0, number), spec.scheme, layers)
                warnings.append(parallel.warning(where, device))
        return Possible([line for line in warnings if line])

    def describe(self, argv: list[str], cells: list[Place], decode_length: int) -> Described:
        """Describe the model, and say which cells cannot be measured and why."""
        from quantbench.run import parallel
        from quantbench.run import plan as planning

        config = parse(argv)
        quiet(config.debug)
        config = dataclasses.replace(
            config, batch_size=1, prefill_size=1, max_new_tokens=1, temperature=0.0
        )
        self.plan = parallel.begin(planning.make_plan(config))
        self.decode_length = decode_length
        refusals = self._refusals(cells)
        refused = {(r.sequence_length, r.batch_size) for r in refusals}
        self.cells = [cell for cell in cells if tuple(cell) not in refused]
        return Described(_facts(self.plan), refusals)

    def load(self) -> Carried:
        """Load and quantize the weights; says how the model is run."""
        from quantbench import generate
        from quantbench.models.weight_bytes import weight_bytes
        from quantbench.run import loading, measure, parallel

        plan = self.plan
        parallel.meet(plan.ranks)
        loaded = loading.load(plan, lambda done, total: None, lambda line: None)
        self.model, self.kernels = loaded.model, loaded.kernels
        measure.check_logits(plan, generate.make_generator(plan, self.model))
        self.meter = Meter.find(plan.device, plan.ranks)
        (weights,) = plan.ranks.total([weight_bytes(self.model)], plan.device)
        return Carried(
            machine=machine(),
            device=str(plan.device),
            precision=str(plan.precision),
            kernel=loaded.kernels,
            weight_bytes=int(weights),
        )

    def cell(self, sequence_length: int, batch_size: int) -> CellReady:
        """Caches for the cell, and compiled steps if the run compiles.

        Raises MemoryShortage if the caches do not fit beside the weights.
        """
        import torch
        from torch._dynamo.utils import counters

        from quantbench.run.plan import prompt_of

        plan = self.plan
        if not self._serves(sequence_length, batch_size):
            self._make_generator(sequence_length, batch_size)
        assert self.generator is not None
        config = dataclasses.replace(plan.config, prefill_size=sequence_length)
        ids = prompt_of(config, plan.architecture.vocab_size, plan.tokenizer)
        self.prompt = torch.tensor([ids] * batch_size, device=plan.device)
        decoder, before = self.generator.decoder, counters["stats"]["unique_graphs"]
        seconds = 0.0
        if self._compiles():
            started = time.perf_counter()
            for _ in range(math.ceil(LEAST_STEPS / (self.decode_length - 1))):
                self.generator.generate(self.prompt, self.decode_length)
            seconds = time.perf_counter() - started
        compiled = counters["stats"]["unique_graphs"] > before
        return CellReady(decoder.name, compiled, seconds, self._estimate(batch_size, ids))

    def _estimate(self, batch_size: int, ids: list[int]) -> dict[str, float] | None:
        """What is estimated of a run of the cell, from the model's first layers."""
        from quantbench import generate
        from quantbench.estimate import beside
        from quantbench.run.measure import facts_of

        assert self.generator is not None
        config = dataclasses.replace(
            self.plan.config, batch_size=batch_size, max_new_tokens=self.decode_length
        )
        plan = dataclasses.replace(
            self.plan, config=config, prompt=ids, cache_size=self.generator.cache_size
        )
        facts = facts_of(plan, self.generator, self.kernels)  # for which all ranks meet

        phases = beside.phases_of(
            facts, self.model, lambda few, _: generate.make_generator(plan, few), ESTIMATE_SECONDS
        )
        return beside.expected(facts, phases).figures

    def runs(self, count: int, seconds: float, metered: bool = False) -> Runs:
        """So many runs of the cell; fewer, at least one, if they take longer than `seconds`.

        metered: whether to count their energy. Runs that a coarse counter needs further are not
        among those returned.
        """
        if not metered:
            return Runs(self._take(count, seconds))
        if isinstance(self.meter, NotCounted):
            return Runs(self._take(count, seconds), self.meter)
        taken: list[LatencySample] = []

        def some() -> int:
            new = self._take(1 if taken else count, seconds)
            if not taken:
                taken.extend(new)
            return len(new)

        used = self.meter.energy(some)
        return Runs(taken, used)

    def _take(self, count: int, seconds: float) -> list[LatencySample]:
        from quantbench.run.clock import Clock

        assert self.generator is not None
        ranks, device = self.plan.ranks, self.plan.device
        samples: list[LatencySample] = []
        started = time.perf_counter()
        while len(samples) < count:
            # All ranks stop when rank 0 does, and none starts before the others.
            (passed,) = ranks.first([time.perf_counter() - started], device)
            if samples and passed > seconds:
                break
            clock = Clock(device)
            done = self.generator.generate(self.prompt, self.decode_length, 0, clock.tick)
            samples.append(LatencySample(done.prefill_seconds, clock.intervals()))
        return samples

    # ------------------------------------------------------------------------- what fits

    def _refusals(self, cells: list[Place]) -> list[Refusal]:
        """Cells past the model's context, and those that do not fit into free memory."""
        from quantbench import devices
        from quantbench.run.sizes import size_of

        plan = self.plan
        free, weights = devices.free_memory(plan.device), 0
        if plan.spec.scheme:
            options = plan.device, plan.precision, plan.config.kernel
            weights = size_of(self._share(), plan.spec.scheme, *options).memory_bytes
        refusals = []
        for length, rows in cells:
            reason = self._past(length) or self._too_large(length, rows, weights, free)
            if reason:
                refusals.append(Refusal(length, rows, reason))
        return refusals

    def _past(self, length: int) -> str | None:
        """Why a prompt of this length and its tokens have no positions."""
        config, context = self.plan.config, self.plan.architecture.max_position
        needed = self._positions(length)
        asked = f"a prompt of {length} tokens and {self.decode_length} new ones"
        if needed > context:
            return f"past the context: {asked} need {needed} positions; the model has {context}"
        if config.cache_size and config.cache_size < needed:
            return f"{asked} need {needed} positions; --cache_size is {config.cache_size}"
        return None

    def _too_large(self, length: int, rows: int, weights: int, free: int | None) -> str | None:
        """Why weights and caches do not fit, on this rank or another one."""
        plan, where = self.plan, launch.place()
        cached = self._cache_bytes(length, rows)
        if free is not None and plan.device.type == "cpu" and where:
            free //= where.local_size
        short = free is not None and weights + cached > free
        (ranks,) = plan.ranks.total([float(short)], plan.device)
        if not ranks:
            return None
        of_weights = f"weights of {size(weights)} and " if weights else ""
        each = " of each rank" if plan.split else ""
        return (
            f"does not fit: {of_weights}a KV cache of {size(cached)}{each} need "
            f"{size(weights + cached)}, and {plan.device} has {size(free or 0)} free"
        )

    def _share(self) -> ModelConfig:
        """The widths of this rank's part of the model."""
        return self.plan.split.config if self.plan.split else self.plan.architecture

    def _positions(self, length: int) -> int:
        return length + self.decode_length

    def _cache_bytes(self, length: int, rows: int) -> int:
        from quantbench.run.sizes import kv_cache_bytes

        plan = self.plan
        positions = plan.config.cache_size or self._positions(length)
        return kv_cache_bytes(self._share(), rows, positions, plan.precision, plan.cache)

    # ------------------------------------------------------------------------- generators

    def _compiles(self) -> bool:
        assert self.generator is not None
        return self.generator.compiles

    def _serves(self, length: int, rows: int) -> bool:
        return self.generator is not None and self.length == length and rows in self.shared

    def _make_generator(self, length: int, rows: int) -> None:
        """The Generator for a cell, in place of the last one."""
        from quantbench import devices

        plan = self.plan
        self._forget()
        reason = self._too_large(length, rows, 0, devices.free_memory(plan.device))
        if reason:
            raise MemoryShortage(reason)
        self.length, self.shared = length, [rows]
        self.generator = self._generator(length, rows)
        if not self._compiles():
            return
        # Larger batches that the same decoder carries out may take what is compiled for this one.
        free = devices.free_memory(plan.device)
        self.shared = [
            number
            for at, number in self.cells
            if at == length
            and self._decoder(number) == self.generator.decoder.name
            and (number <= rows or not self._too_large(length, number, 0, free))
        ]
        if max(self.shared) > rows:
            self._forget()
            self.generator = self._generator(length, max(self.shared))

    def _forget(self) -> None:
        """Drop the present Generator, and free its caches."""
        import torch

        compiled = self.generator is not None and self._compiles()
        self.generator = None
        torch._dynamo.reset()  # else the compiler takes the other caches' sizes for variable ones
        if compiled:
            gc.collect()  # what dynamo traced with refers to itself, and to the caches

    def _generator(self, length: int, rows: int) -> generate.Generator:
        from quantbench import generate

        config = dataclasses.replace(self.plan.config, batch_size=rows)
        positions = config.cache_size or self._positions(length)
        plan = dataclasses.replace(self.plan, config=config, cache_size=positions)
        return generate.make_generator(plan, self.model, any_rows=True)

    def _decoder(self, rows: int) -> str | None:
        """The name of the decoder for `rows` rows; None if no decoder can run."""
        from quantbench.run import decoding

        assert self.generator is not None
        config, caches = self.plan.config, self.generator.caches
        try:
            return decoding.choose(config.decoder, self.model, caches, rows, config.compile).name
        except KernelError:
            return None


def _facts(plan: Plan) -> ModelFacts:
    config = plan.architecture
    return ModelFacts(
        name=plan.name,
        layers=config.num_layers,
        width=config.dim,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        feed_forward=config.ffn_dim,
        vocabulary=config.vocab_size,
    )


if __name__ == "__main__":
    serve(LatencyWorker())
