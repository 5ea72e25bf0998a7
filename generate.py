"""Generate text with a quantized Llama-family model, and log how fast it went and what it cost.

    python generate.py --quantization int8wo --compile                  # the embedded model
    python generate.py --checkpoint_path DIR --compile --interactive    # talk to your own
    python generate.py --checkpoint_path dummy:Llama-3.2-1B --compile   # speed without a download

    generator = Generator(models.load("tiny", quantization="int8wo"), cache_size=256)
    generator.generate(prompt, max_new_tokens=100).tokens

The file has this order: how a token is drawn (`sample`), how a prompt is read (`prefill`), one
decoding step (`decode_one_token`), the loop around them (`Generator`), and the run of the command
(`run`): plan, load, warm up, measure, and append one line to benchmarks.txt that ends with the
command to repeat the run. Each of these steps, and the decoders, is a file in quantbench/run/; the
options are in quantbench/commands/generate.py. The README says what the numbers mean.
"""

if __name__ == "__main__":  # options are read, and variables set, before torch is imported
    from quantbench.commands.generate import generate as main

    main()

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from torch import Tensor

from quantbench import devices
from quantbench.environment import without_collections
from quantbench.errors import UsageError
from quantbench.kv_cache import CACHES
from quantbench.kv_cache.base import KVCache, LayerMemory
from quantbench.log import log
from quantbench.log.config import RunConfig
from quantbench.models.llama import Transformer
from quantbench.progress import progress, say
from quantbench.run import decoding, loading, measure, run_table, sizes, why
from quantbench.run.decoding import Decoder
from quantbench.run.facts import Generation, Measured, make_record
from quantbench.run.plan import Plan, begin, make_plan
from quantbench.typed_json import to_json

LARGEST_DEFAULT_CACHE = 4096  # positions of a Generator's caches, if cache_size is not given


# ---------------------------------------------------------------------------------- one token


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 0.0  # 0: greedy, the most probable token
    top_k: int = 200  # otherwise draw from this many of the most probable tokens


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """The next token of every row, (B, 1) int64, from logits (B, V)."""
    if sampling.temperature == 0:
        return logits.max(-1, keepdim=True).indices  # on the CPU 4.6 times as fast as argmax
    return draw(*likely(logits, sampling))


def likely(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Probabilities and tokens of those that `sample` may draw from logits (…, V); both (…, k)."""
    if sampling.temperature == 0:
        best = logits.max(-1, keepdim=True)
        return torch.ones_like(best.values, dtype=torch.float32), best.indices
    top, tokens = logits.float().topk(min(sampling.top_k, logits.shape[-1]))
    return (top / sampling.temperature).softmax(-1), tokens


def draw(weights: Tensor, tokens: Tensor) -> Tensor:
    """One of `tokens` (…, k) by its weight (…, k): (…, 1).

    The largest quotient of a weight and exponential noise is an exact draw (the exponential form of
    the Gumbel-max trick). Unlike torch.multinomial it does not synchronize the device.
    """
    noise = weights.new_empty(weights.shape).exponential_(1)
    return tokens.gather(-1, (weights / noise).argmax(-1, keepdim=True))


def prefill(
    model: Transformer,
    chunks: Iterator[tuple[Tensor, Tensor]],
    caches: Sequence[LayerMemory],
    sampling: Sampling,
    read: Callable[..., Tensor] = Transformer.hidden,
) -> Tensor:
    """Read a prompt in chunks (tokens, positions). Returns the next token (B, 1).

    read: of the model, a chunk (B, S), its positions (S,) and the caches, what the last layer
    returns (B, S, D).
    """
    for tokens, positions in chunks:
        x = read(model, tokens, positions, caches)
    return sample(model.logits(x[:, -1]), sampling)


def decode_one_token(
    decoder: Decoder,
    token: Tensor,
    position: Tensor,
    sampling: Sampling,
    step: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Read one token of every row, (B, 1), at position (1,). Returns the next token and position.
    step: the compiled method of the decoder; its own if not given.

    The shapes are the same in every step, so it is compiled once. Inputs and outputs stay on the
    device, so the CPU need not wait for an accelerator between steps.
    """
    logits = step(decoder, token, position) if step else decoder.step(token, position)
    return sample(logits, sampling), position + 1


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
        any_rows: bool = False,
        prefill_chunk: int | None = None,
        sampling: Sampling | None = None,
        caches: list[LayerMemory] | None = None,
    ) -> None:
        """batch_size: the largest number of rows.
        cache_size: positions; if not given, the model's context, but at most 4096.
        kv_cache: a name of kv_cache.CACHES.
        decoder: a name of log.config.DECODERS.
        compile_decode, compile_prefill: whether to compile the decoding step and the prefill. The
        prompts of a mixture or a model with states never are, and a mixture's steps are on CUDA,
        with all experts in one memory.
        any_rows: whether what is compiled for several rows serves any other number from 2 on.
        prefill_chunk: prompt tokens of a row per forward pass; devices.prefill_chunk if not given.
        sampling: greedy if not given.
        caches: another Generator's, to write to these; new ones if not given.

        On the CPU, the first Generator builds the C++ kernels, which takes a minute once. Raises
        UsageError for a kind of cache that does not exist or does not support the model's head_dim,
        KernelError for a decoder that cannot run.
        """
        config, weight = model.config, model.tok_embeddings.weight
        self.model, self.device, self.batch_size = model, weight.device, batch_size
        self.sampling = sampling or Sampling()
        self.cache_size = cache_size or min(config.max_position, LARGEST_DEFAULT_CACHE)
        self.prefill_chunk = prefill_chunk
        if kv_cache not in CACHES:
            raise UsageError(f"kv_cache {kv_cache!r}: there are {', '.join(CACHES)}")
        kind, dtype = CACHES[kv_cache], weight.dtype
        self.attention = decoding.attention_of(kind, config, dtype, self.device)
        self.caches = caches or decoding.caches_of(
            kind, config, batch_size, self.cache_size, dtype, self.device, self.attention.name
        )
        compile_decode = compile_decode and model.compiles()
        self.states = [memory for memory in self.caches if not isinstance(memory, KVCache)]
        self.decoder = decoding.choose(decoder, model, self.caches, batch_size, compile_decode)
        # Around a single op torch.compile would only add its own overhead.
        self.compiled_step = compile_decode and self.decoder.name != decoding.FUSED
        self.compiled_prefill = compile_prefill and not (config.mixture or config.recurrent)

        self.step: Callable[..., Tensor] = type(self.decoder).step
        self.decode_one_token: Callable[..., tuple[Tensor, Tensor]] = decode_one_token
        self.read_chunk: Callable[..., Tensor] = type(model).hidden
        compiled = functools.partial(decoding.compiled, device=self.device, rows=any_rows)
        if self.compiled_step:
            self.step = compiled(self.step)
            if self.device.type == "cpu":  # inductor takes seconds for a draw of microseconds
                self.decode_one_token = functools.partial(decode_one_token, step=self.step)
            else:  # the draw is in the step's CUDA graph
                self.decode_one_token = compiled(decode_one_token)
        if self.compiled_prefill:
            self.read_chunk = compiled(self.read_chunk, length=True)

    @property
    def compiles(self) -> bool:
        """Whether torch.compile compiles anything."""
        return self.compiled_step or self.compiled_prefill

    @torch.no_grad()
    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Logits (B, S, V) of tokens (B, S) at positions start, start + 1, …, through the caches.

        The tokens attend to the positions before `start` in the caches, and are stored there. They
        are a prompt, a part of one, or few enough for a step, which the decoder carries out.
        Raises UsageError for positions or rows that the caches do not have, or that states passed.
        """
        self._check(tokens, start, begins=True)
        if self.decoder.takes(tokens):
            step = self.step(self.decoder, tokens, self._position(start))
            return step.reshape(*tokens.shape, -1).clone()
        pieces = [
            self.model.logits(self.read_chunk(self.model, *chunk, self.caches))
            for chunk in self._chunks(tokens, start)
        ]
        return torch.cat(pieces, 1)

    @torch.no_grad()
    def stream(self, prompt: Tensor, start: int = 0) -> Iterator[Tensor]:
        """Read a prompt (B, S) at positions start, start + 1, …, and yield new tokens (B, 1).

        It goes on until the caller stops; raises UsageError when the caches are full. Each token is
        copied, because a CUDA graph overwrites the result of its last run.
        """
        self._check(prompt, start, begins=True)
        end = start + prompt.shape[1]  # position of the first new token
        if prompt.shape[1] == 1:
            token, position = self.decode_one_token(
                self.decoder, prompt, self._position(start), self.sampling
            )
        else:
            chunks = self._chunks(prompt, start)
            token = prefill(self.model, chunks, self.caches, self.sampling, self.read_chunk)
            position = self._position(end)
        yield token.clone()
        for now in itertools.count(end):
            self._check(token, now)
            token, position = self.decode_one_token(
                self.decoder, token.clone(), position.clone(), self.sampling
            )
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
        self._check(prompt, start, new_tokens=max_new_tokens - 1)
        devices.synchronize(self.device)
        with without_collections():
            started = time.perf_counter()
            stream = self.stream(prompt, start)
            tokens = [next(stream)]
            devices.synchronize(self.device)
            prefilled = time.perf_counter()
            after_token()
            for _ in range(max_new_tokens - 1):
                tokens.append(next(stream))
                after_token()
            devices.synchronize(self.device)
            ended = time.perf_counter()
        return Generation(torch.cat(tokens, 1), prefilled - started, ended - prefilled)

    @torch.no_grad()
    def fill_randomly(self, depth: int) -> None:
        """Put random keys and values at positions 0 to depth - 1 of every layer."""
        for cache in self.caches:
            cache.fill(depth)

    def keep(self, count: int, read: int = 0) -> int:
        """How many of the first `count` of `read` positions the layers can go on behind: all, or
        0."""
        return min([count, *(memory.keep(count, read) for memory in self.caches)])

    def _chunks(self, tokens: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of tokens (B, S), and their positions, which stay on the CPU (ops/attend.py)."""
        size = self.prefill_chunk or devices.prefill_chunk(self.device, tokens.shape[0])
        for chunk in torch.split(tokens, size, dim=1):
            yield chunk, torch.arange(start, start + chunk.shape[1])
            start += chunk.shape[1]

    def tensor(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Tokens by rows, on the device."""
        return torch.tensor(tokens, device=self.device)

    def _position(self, number: int) -> Tensor:
        return torch.full((1,), number, device=self.device)

    def _check(self, tokens: Tensor, start: int, new_tokens: int = 0, begins: bool = False) -> None:
        """Raise UsageError unless the caches have these rows, and room for `new_tokens` more."""
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise UsageError(
                f"tokens have to be (rows, positions), one or more; given: {[*tokens.shape]}"
            )
        rows, end = tokens.shape[0], start + tokens.shape[1] + new_tokens
        if rows > self.batch_size:
            raise UsageError(
                f"{rows} rows, and the caches have {self.batch_size}: batch_size={rows}"
            )
        if start < 0 or end > self.cache_size:
            raise UsageError(
                f"positions {start} to {end - 1}, and the caches have {self.cache_size}: give a "
                "larger cache_size, or fewer tokens"
            )
        if begins and self.states and self.states[0].keep(start) < start:
            raise UsageError(
                f"position {start}: the model's states have read on; start at position 0, or where "
                "the text so far ends"
            )


# ---------------------------------------------------------------------------------- the run


def run(config: RunConfig, started: float) -> None:
    """Plan, load, warm up, measure, print and log. started: time.perf_counter() of the process."""
    plan = begin(make_plan(config))  # threads are set, and ranks joined
    config, free = plan.config, devices.free_memory(plan.device)
    if config.dry_run:
        from quantbench.run import dry_run

        click.echo(dry_run.report(plan, free))
        return
    say(sizes.fits(plan, free))
    plan.ranks.meet()  # before loading: else a late rank would find less free memory
    with progress(f"Loading {plan.name} as {plan.spec.name}") as report:
        loaded = loading.load(plan, report, say)
    for note in plan.notes:
        say(note)
    generator = make_generator(plan, loaded.model)
    if config.interactive:
        from quantbench.run.chat import chat

        chat(plan, generator)
        return
    one_sample = measure.Sampler(plan, generator)
    ready = measure.get_ready(one_sample, since=started)
    measured = measure.measure(one_sample, loaded, ready)
    plan.ranks.meet()  # nothing is logged unless all ranks have come to the end
    if plan.ranks.rank == 0:
        finish(config, measured)


def make_generator(plan: Plan, model: Transformer, any_rows: bool = False) -> Generator:
    """The Generator for a plan, its caches filled up to --context_depth."""
    config = plan.config
    generator = Generator(
        model,
        config.batch_size,
        plan.cache_size,
        plan.kv_cache,
        config.decoder,
        compile_decode=config.compile,
        compile_prefill=config.compile_prefill,
        any_rows=any_rows,
        prefill_chunk=config.prefill_chunk,
        sampling=Sampling(config.temperature, config.top_k),
    )
    if reason := generator.attention.reason:
        say(f"Attention runs on plain torch, which is slow: {reason}")
    if config.speculate != RunConfig.speculate:
        from quantbench.speculate import speculating

        generator = speculating(plan, generator)
    if config.context_depth:
        with progress(f"Filling {config.context_depth} positions of the KV cache"):
            torch.manual_seed(config.seed)
            generator.fill_randomly(config.context_depth)
    return generator


def finish(config: RunConfig, measured: Measured) -> None:
    """Append to the log and to --output_json_path, then print the text, the table and the why."""
    # tok/s: the mean of new tokens of a row ÷ seconds, the prompt's included. The line's mem/s is
    # that times the weights' bytes, and its peak memory that of the samples.
    tok_s, peak = measured.summary.tok_s, measured.peaks["generate"]
    line = make_record(measured.facts, tok_s, peak).render()
    reasons = why.reasons(measured)
    if config.write_result != "none":
        log.append(Path(config.write_result), line)
        say(f"Appended one line to {config.write_result}")
    if config.output_json_path:
        content = {"line": line, **to_json(measured), "why": reasons}
        log.append_json(Path(config.output_json_path), content)
        say(f"Appended every sample to {config.output_json_path}")
    if measured.text is not None:  # printed last: with a closed or full stdout the log is complete
        click.echo(measured.text + "\n")
    click.echo(run_table.table(measured))
    for remark in [*(f"- {reason}" for reason in reasons), *run_table.remarks(measured)]:
        say(remark)
