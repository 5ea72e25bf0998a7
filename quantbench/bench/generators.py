"""Generators of one loaded model for cells of `latency`: batch sizes and prompt lengths.

    generators = Generators(plan, model)
    plan, generator = generators.at(prompt=100, rows=2, new_tokens=8, most_rows=32)

A cell has caches for its rows and positions. Where steps are compiled, cells of one prompt length
share a Generator with caches for the largest batch, so that what was compiled for one batch size
serves the others.
"""

import dataclasses
import gc

from quantbench import devices, environment, generate
from quantbench.errors import KernelError, MemoryShortage
from quantbench.models.llama import Transformer
from quantbench.run import decoding
from quantbench.run.plan import Plan, positions, prompt_of
from quantbench.run.sizes import kv_cache_bytes
from quantbench.text import size


class Generators:
    generator: generate.Generator | None = None
    length = rows = 0  # of the prompts and batches that it serves: these rows, or up to these

    def __init__(self, plan: Plan, model: Transformer) -> None:
        self.plan, self.model = plan, model

    def at(
        self, prompt: int, rows: int, new_tokens: int, most_rows: int
    ) -> tuple[Plan, generate.Generator]:
        """The plan and the Generator of a cell. most_rows: the largest batch that is to come.

        Raises UsageError past the model's context, MemoryShortage where the caches do not fit.
        """
        base = self.plan
        config = dataclasses.replace(
            base.config, prefill_size=prompt, batch_size=rows, max_new_tokens=new_tokens
        )
        cache_size = positions(config, prompt, base.architecture.max_position)
        ids = prompt_of(config, base.architecture.vocab_size, base.tokenizer)
        plan = dataclasses.replace(base, config=config, prompt=ids, cache_size=cache_size)
        shared = self.generator is not None and self.generator.compiles and rows <= self.rows
        if not shared or self.length != prompt:
            self.generator = self._made(plan, most_rows)
        assert self.generator is not None
        return plan, self.generator

    def _made(self, plan: Plan, most_rows: int) -> generate.Generator:
        self._forget()
        config = plan.config
        if reason := self._shortage(plan, config.batch_size):
            raise MemoryShortage(reason)
        generator = self._of_rows(plan, config.batch_size)
        if not generator.compiles or most_rows <= config.batch_size:
            return generator
        try:
            given = (config.decoder, self.model, generator.caches, most_rows, config.compile)
            alike = decoding.choose(*given).name == generator.decoder.name
        except KernelError:
            alike = False
        if not alike or self._shortage(plan, most_rows):
            return generator
        del generator
        self._forget()
        return self._of_rows(plan, most_rows)

    def _of_rows(self, plan: Plan, rows: int) -> generate.Generator:
        self.length, self.rows = len(plan.prompt), rows
        config = dataclasses.replace(plan.config, batch_size=rows)
        return generate.make_generator(
            dataclasses.replace(plan, config=config), self.model, any_rows=True
        )

    def _forget(self) -> None:
        """Drop the present Generator, and free its caches."""
        compiled = self.generator is not None and self.generator.compiles
        self.generator = None
        if compiled:
            gc.collect()  # what dynamo traced with refers to itself, and to the caches

    def _shortage(self, plan: Plan, rows: int) -> str | None:
        """Why the caches do not fit into the memory that the weights leave, on any rank."""
        where, free = environment.place(), devices.free_memory(plan.device)
        part = plan.split.config if plan.split else plan.architecture
        cached = kv_cache_bytes(part, rows, plan.cache_size, plan.precision, plan.cache)
        if free is not None and plan.device.type == "cpu" and where:
            free //= where.local_size
        (ranks,) = plan.ranks.total([float(free is not None and cached > free)], plan.device)
        if not ranks:
            return None
        each = " of each rank" if plan.split else ""
        return (
            f"out of memory: a KV cache of {size(cached)}{each} does not fit: {plan.device} has "
            f"{size(free or 0)} free beside the weights"
        )
