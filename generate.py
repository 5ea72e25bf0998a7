"""Generate text with a quantized Llama-family model, and log how fast it went and what it cost.

    python generate.py --quantization int8wo --compile                  # the embedded model
    python generate.py --checkpoint_path DIR --compile --interactive    # talk to your own
    python generate.py --checkpoint_path dummy:Llama-3.2-1B --compile   # speed without a download

    generator = Generator(models.load("tiny", quantization="int8wo"), cache_size=256)
    generator.generate(prompt, max_new_tokens=100).tokens

The file has this order: how a token is drawn (`sample`), how a prompt is read (`prefill`), one
decoding step (`decode_one_token`), the loop around them (`Generator`), and the command. The command
plans a run, loads the model, warms up, measures, and appends one line to benchmarks.txt that ends
with the command to repeat the run. Each of these steps, and the decoders, is a file in run/. The
README says what the numbers mean.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantbench.cli import OneLineErrors, progress, quiet, say
from quantbench.errors import UsageError
from quantbench.log import log, table
from quantbench.log.config import RunConfig, options
from quantbench.run import environment, launch
from quantbench.run.checks import check
from quantbench.typed_json import from_json, to_json

if TYPE_CHECKING:  # torch takes seconds to import, and neither --help nor a usage error needs it
    from torch import Tensor

    from quantbench.kv_cache.base import KVCache
    from quantbench.models.llama import Transformer
    from quantbench.quantize.spec import Selection, Spec
    from quantbench.run.decoding import Decoder
    from quantbench.run.facts import Measured
    from quantbench.run.generation import Generation
    from quantbench.run.plan import Plan

STARTED = time.perf_counter()  # start of the process, but for 0.1 s of Python and the imports above
LARGEST_DEFAULT_CACHE = 4096  # positions of a Generator's caches, if cache_size is not given


# ---------------------------------------------------------------------------------- one token


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 0.0  # 0: greedy, the most probable token
    top_k: int = 200  # otherwise draw from this many of the most probable tokens


def sample(logits: Tensor, how: Sampling) -> Tensor:
    """The next token of every row, (B, 1) int64, from logits (B, V).

    The largest quotient of a probability and exponential noise is an exact draw (the exponential
    form of the Gumbel-max trick). Unlike torch.multinomial it does not synchronize the device.
    """
    if how.temperature == 0:
        return logits.max(-1, keepdim=True).indices  # on the CPU 4.6 times as fast as argmax
    top, tokens = logits.float().topk(min(how.top_k, logits.shape[-1]))
    probabilities = (top / how.temperature).softmax(-1)
    noise = probabilities.new_empty(probabilities.shape).exponential_(1)
    return tokens.gather(-1, (probabilities / noise).argmax(-1, keepdim=True))


def prefill(
    model: Transformer,
    caches: Sequence[KVCache],
    tokens: Tensor,
    positions: Tensor,
    start: int,
    how: Sampling,
) -> tuple[Tensor, Tensor]:
    """Read the last or only chunk of a prompt: tokens (B, S) at positions (S,), from `start` on.

    Returns the next token (B, 1) and its position (1,).
    """
    logits = model(tokens, positions, caches, last_only=True, start=start)
    return next_token(logits[:, -1], positions[-1:], how)


def decode_one_token(
    decoder: Decoder, token: Tensor, position: Tensor, how: Sampling
) -> tuple[Tensor, Tensor]:
    """Read one token of every row, (B, 1), at position (1,). Returns the next token and position.

    The shapes are the same in every step, so it is compiled once. Inputs and outputs stay on the
    device, so the CPU need not wait for an accelerator between steps.
    """
    return next_token(decoder.step(token, position), position, how)


def next_token(logits: Tensor, position: Tensor, how: Sampling) -> tuple[Tensor, Tensor]:
    """`sample` of logits (B, V) at position (1,), and the position after it.

    On the CPU it is an opaque op (run/compiling.py), which a Generator registers.
    """
    if logits.device.type != "cpu":
        return sample(logits, how), position + 1
    import torch

    token, following = torch.ops.quantbench.draw(logits, position, how.temperature, how.top_k)
    return token, following


# ---------------------------------------------------------------------------------- the loop


class Generator:
    """A model that generates text, with its caches, its decoder and its compiled functions.

    The model is only read, so several Generators can share one. It must not change while they do.

        generator = Generator(model, batch_size=2, cache_size=256)
        generator.forward(prompt, 0)                        # logits (2, S, V)
        generator.generate(prompt, 20).tokens               # (2, 20)
    """

    def __init__(
        self,
        model: Transformer,
        batch_size: int = 1,
        cache_size: int | None = None,
        kv_cache: str = "dense",
        decoder: str = "auto",
        *,
        compile_decode: bool = False,
        compile_prefill: bool = False,
        prefill_chunk: int | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        """batch_size: the largest number of rows.
        cache_size: positions; if not given, the model's context, but at most 4096.
        kv_cache: a name of kv_cache.CACHES.
        decoder: "auto" or a name of run.decoding.DECODERS.
        compile_decode, compile_prefill: whether to compile the decoding step and the prefill. A
        mixture of experts is never compiled: which experts it computes depends on the numbers.
        prefill_chunk: prompt tokens of a row per forward pass; devices.prefill_chunk if not given.
        sampling: greedy if not given.

        On the CPU, the first Generator builds the C++ kernels, which takes a minute once. Raises
        UsageError for a kind of cache that does not exist or does not support the model's head_dim,
        KernelError for a decoder that cannot run.
        """
        import torch

        from quantbench.kv_cache import CACHES
        from quantbench.run import caches, compiling, decoding

        compiling.opaque_draw(lambda logits, *how: sample(logits, Sampling(*how)))
        config, weight = model.config, model.tok_embeddings.weight
        self.model, self.device, self.batch_size = model, weight.device, batch_size
        self.sampling = sampling or Sampling()
        self.cache_size = cache_size or min(config.max_position, LARGEST_DEFAULT_CACHE)
        self.prefill_chunk = prefill_chunk
        if kv_cache not in CACHES:
            raise UsageError(f"kv_cache {kv_cache!r}: there are {', '.join(CACHES)}")
        kind, dtype = CACHES[kv_cache], weight.dtype
        self.attention = caches.attention_of(kind, config, dtype, self.device)
        how = dtype, self.device, self.attention.name
        self.caches = caches.of_layers(kind, config, batch_size, self.cache_size, *how)
        compile_decode = compile_decode and model.compilable
        self.decoder = decoding.choose(decoder, model, self.caches, batch_size, compile_decode)

        # For a step and for a prompt's chunks: the functions that draw a token, and those that give
        # logits. `fill` is for the chunks before a prompt's last one.
        step: list[Callable[..., Any]] = [self._step, self.decoder.step]
        prompt: list[Callable[..., Any]] = [self._prefill, self._fill, self._logits]
        settings: dict[str, Any] = {"fullgraph": True, "options": compiling.options(self.device)}
        compile_decode = compile_decode and not self.decoder.one_op
        compile_prefill = compile_prefill and model.compilable
        self.compiles = compile_decode or compile_prefill  # whether anything is compiled
        if compile_decode:
            # A compiled call checks every weight first: for 300 of them longer than Python takes.
            step = [torch.compile(function, **settings) for function in step]
        if compile_prefill:
            if self.device.type != "cpu":  # no CUDA graphs: they have one length, prompts many
                settings["options"] = {}
            compiled = [torch.compile(function, **settings) for function in prompt]
            prompt = [compiling.for_any_length(function) for function in compiled]
        self.step, self.step_logits = map(torch.no_grad(), step)
        self.prefill, self.fill, self.prompt_logits = map(torch.no_grad(), prompt)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Logits (B, S, V) of tokens (B, S) at positions start, start + 1, …, through the caches.

        The tokens attend to the positions before `start` in the caches, and are stored there. They
        are a prompt, a part of one, or with S = 1 a decoding step, which the decoder carries out.
        Raises UsageError for positions or rows that the caches do not have.
        """
        import torch

        self._check(tokens, start)
        if tokens.shape[1] == 1:
            step: Tensor = self.step_logits(tokens, self._positions(tokens, start))
            return step[:, None].clone()
        pieces = []
        for chunk in self._chunks(tokens):
            pieces.append(self.prompt_logits(chunk, self._positions(chunk, start), start))
            start += chunk.shape[1]
        return torch.cat(pieces, 1)

    def stream(self, prompt: Tensor, start: int = 0) -> Iterator[Tensor]:
        """Read a prompt (B, S) at positions start, start + 1, …, and yield new tokens (B, 1).

        It goes on until the caller stops; raises UsageError when the caches are full. Each token is
        copied, because a CUDA graph overwrites the result of its last run.
        """
        from quantbench.run.compiling import fusing_attention

        self._check(prompt, start)
        *chunks, last = self._chunks(prompt)
        for chunk in chunks:
            self.fill(chunk, self._positions(chunk, start), start)
            start += chunk.shape[1]
        positions = self._positions(last, start)
        if last.shape[1] == 1:
            token, position = self.step(last, positions)
        else:
            token, position = self.prefill(last, positions, start)
        yield token.clone()
        for end in itertools.count(start + last.shape[1]):
            self._check(token, end)
            with fusing_attention(self.device):
                token, position = self.step(token.clone(), position.clone())
            yield token.clone()

    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        start: int = 0,
        after_token: Callable[[], object] = lambda: None,
    ) -> Generation:
        """Continue prompt (B, S), a tensor on the device, by exactly max_new_tokens tokens.

        start: position of the prompt's first token.
        after_token: called after the prompt, and after each decoding step was issued. On an
        accelerator that is before the step has finished.
        Raises UsageError for positions or rows that the caches do not have. The last new token
        needs no position.
        """
        import torch

        from quantbench.devices import synchronize
        from quantbench.run.environment import without_collections
        from quantbench.run.generation import Generation

        self._check(prompt, start, more=max_new_tokens - 1)
        synchronize(self.device)
        with without_collections():
            started = time.perf_counter()
            stream = self.stream(prompt, start)
            tokens = [next(stream)]
            synchronize(self.device)
            prefilled = time.perf_counter()
            after_token()
            for _ in range(max_new_tokens - 1):
                tokens.append(next(stream))
                after_token()
            synchronize(self.device)
            ended = time.perf_counter()
        return Generation(torch.cat(tokens, 1), prefilled - started, ended - prefilled)

    def fill_randomly(self, depth: int) -> None:
        """Put random keys and values at positions 0 to depth - 1 of every layer."""
        import torch

        with torch.no_grad():
            for cache in self.caches:
                cache.fill(depth)

    def _prefill(self, tokens: Tensor, positions: Tensor, start: int) -> tuple[Tensor, Tensor]:
        return prefill(self.model, self.caches, tokens, positions, start, self.sampling)

    def _fill(self, tokens: Tensor, positions: Tensor, start: int) -> Tensor:
        return self.model.hidden(tokens, positions, self.caches, start=start)

    def _step(self, token: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        return decode_one_token(self.decoder, token, position, self.sampling)

    def _logits(self, tokens: Tensor, positions: Tensor, start: int) -> Tensor:
        logits: Tensor = self.model(tokens, positions, self.caches, start=start)
        return logits

    def _chunks(self, tokens: Tensor) -> Sequence[Tensor]:
        import torch

        from quantbench.devices import prefill_chunk

        size = self.prefill_chunk or prefill_chunk(self.device, tokens.shape[0])
        return torch.split(tokens, size, dim=1)

    def _positions(self, tokens: Tensor, start: int) -> Tensor:
        import torch

        return torch.arange(start, start + tokens.shape[1], device=self.device)

    def _check(self, tokens: Tensor, start: int, more: int = 0) -> None:
        """Raise UsageError unless the caches have these rows, positions and `more` after them."""
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise UsageError(
                f"tokens have to be (rows, positions), one or more; given: {[*tokens.shape]}"
            )
        rows, end = tokens.shape[0], start + tokens.shape[1] + more
        if rows > self.batch_size:
            raise UsageError(
                f"{rows} rows, and the caches have {self.batch_size}: batch_size={rows}"
            )
        if start < 0 or end > self.cache_size:
            raise UsageError(
                f"positions {start} to {end - 1}, and the caches have {self.cache_size}: give a "
                "larger cache_size, or fewer tokens"
            )


# ---------------------------------------------------------------------------------- the command


@click.command(cls=OneLineErrors, epilog="The log is checked by: quantbench log check FILE")
@options()
def main(**given: Any) -> None:
    """Generate text with a quantized Llama-family model and log its speed and memory."""
    environment.prepare()
    config = RunConfig(**given)
    scheme = check(config)
    quiet(config.debug)
    if config.tp > 1 and launch.place() is None:
        launch.start(config)
    else:
        run_command(launch.become_rank(config), scheme)


def run_command(config: RunConfig, scheme: Spec | Selection) -> None:
    """Plan, load, warm up, measure, print and log."""
    with progress("Starting torch", lasting=False):
        from quantbench import devices
        from quantbench.run import chat, loading, measure, parallel, sizes, tiers
        from quantbench.run.plan import make_plan
    plan = tiers.checked(make_plan(config, scheme))
    config, device, free = plan.config, plan.device, devices.free_memory(plan.device)
    if config.dry_run:
        click.echo(sizes.report(plan, free))
        return
    say(sizes.fits(plan, free))
    parallel.meet(plan.ranks)  # or one that is late would find memory taken by the others
    with progress(f"Loading {plan.name} as {plan.spec}") as report:
        loaded = loading.load(plan, report, say)
    generator = make_generator(plan, loaded.model)
    if config.interactive:
        chat.chat(plan, generator)
        return
    one_sample = measure.sampler(plan, generator)
    ready = measure.get_ready(config, device, one_sample, generator.compiles, since=STARTED)
    measured = measure.measure(plan, generator, loaded, one_sample, ready)
    parallel.meet(plan.ranks)  # nothing is logged unless all ranks have come to the end
    if plan.ranks.rank == 0:
        finish(config, measured)


def make_generator(plan: Plan, model: Transformer) -> Generator:
    """The Generator for a plan, its caches filled up to --context_depth."""
    import torch

    config = plan.config
    generator = Generator(
        model,
        config.batch_size,
        plan.cache_size,
        plan.kv_cache,
        config.decoder,
        compile_decode=config.compile,
        compile_prefill=config.compile_prefill,
        prefill_chunk=config.prefill_chunk,
        sampling=Sampling(config.temperature, config.top_k),
    )
    if reason := generator.attention.reason:
        say(f"Attention runs on plain torch, which is slow: {reason}")
    if config.context_depth:
        with progress(f"Filling {config.context_depth} positions of the KV cache"):
            torch.manual_seed(config.seed)
            generator.fill_randomly(config.context_depth)
    return generator


def finish(config: RunConfig, measured: Measured) -> None:
    """Append to the log and to --output_json_path, then print the text, the table and the why."""
    from quantbench.estimate.beside import report_of
    from quantbench.run.facts import make_record

    report = report_of(measured)
    line = make_record(measured.facts, measured.summary.tok_s, measured.peaks.generate).render()
    if config.write_result != "none":
        log.append(Path(config.write_result), line)
        say(f"Appended one line to {config.write_result}")
    if config.output_json_path:
        log.append_json(Path(config.output_json_path), {"line": line, **to_json(report)})
        say(f"Appended every sample to {config.output_json_path}")
    if measured.text is not None:  # printed last: with a closed or full stdout the log is complete
        click.echo(measured.text + "\n")
    run = from_json(table.Run, to_json(report))
    click.echo(table.one_run(run))
    for sentence in [*(f"- {reason}" for reason in report.reasons), *table.remarks([run])]:
        say(sentence)


if __name__ == "generate":  # imported in the checkout by its short name: be quantbench.generate
    from quantbench.short_names import names

    names.bind(__name__)

if __name__ == "__main__":
    main()
