"""Generate text with a quantized Llama-family model, and log how fast it went and what it cost.

    python generate.py --quantization int8wo --compile                  # the embedded model
    python generate.py --checkpoint_path DIR --compile --interactive    # talk to your own
    python generate.py --checkpoint_path dummy:Llama-3.2-1B --compile   # speed without a download

A run loads the model layer by layer, quantizing each as it arrives; warms up until two samples
agree; then takes --num_samples samples and appends one line to benchmarks.txt with the command
that repeats it. What the numbers mean is in the README.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchlog import log
from benchlog.config import RunConfig, options, repro
from benchlog.origin import git_commit, versions
from benchlog.record import Record
from benchlog.table import table
from cli import OneLineErrors, Report, progress, quiet, say
from errors import UsageError
from run import environment
from run.checks import check, check_name

if TYPE_CHECKING:  # torch takes seconds to import; --help and a mistyped option need none of it
    import torch

    from models.config import ModelConfig
    from models.llama import Transformer
    from models.tokenizer import Tokenizer
    from quantize.spec import Spec
    from run.loading import Loading
    from run.session import Generation, Session

STARTED = time.perf_counter()  # of this process: Python and the imports above take 0.1 s
AGREEMENT = 0.05  # two warm-up samples this close to each other are steady
MAX_WARM_UPS = 5
INTERACTIVE_CACHE = 4096  # positions, unless --cache_size or a shorter context says otherwise


@click.command(cls=OneLineErrors, epilog="Docs: README.md. Log lines: python -m benchlog check.")
@options()
def main(**given: Any) -> None:
    """Generate text with a quantized Llama-family model and log its speed and memory."""
    environment.prepare()
    config = RunConfig(**given)
    check(config)
    quiet(config.debug)
    run(config)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run that makes sense: everything checked that can be checked without the weights."""

    config: RunConfig
    name: str
    device: torch.device
    spec: Spec
    loading: Loading
    architecture: ModelConfig
    tokenizer: Tokenizer
    prompt: list[int]
    cache_size: int


def run(config: RunConfig) -> None:
    """Plan, load, warm up, measure, print and log."""
    with progress("Starting torch", lasting=False):
        import quantize.registry  # noqa: F401
    plan = make_plan(config)
    if config.dry_run:
        click.echo(dry_run(plan))
        return
    say(memory(plan))
    with progress(f"Loading {plan.name} as {plan.spec}") as report:
        model, load_memory = load(plan, report)
    session = make_session(plan, model)
    if config.interactive:
        chat(plan, session)
        return
    details = measure(plan, session)
    details["peak_memory_bytes"]["load"] = load_memory
    record = make_record(plan.config, details)
    if config.write_result != "none":
        log.append(Path(config.write_result), record.render())
        say(f"Appended one line to {config.write_result}")
    if config.output_json_path:
        log.append_json(Path(config.output_json_path), {"line": record.render(), **details})
        say(f"Appended every sample to {config.output_json_path}")
    if details["text"] is not None:  # last, for a stdout that takes nothing must lose no run
        click.echo(details["text"] + "\n")
    click.echo(table([details]))


def make_plan(config: RunConfig) -> Plan:
    """Find the device, scheme, kernel, architecture and tokenizer, and check that all fits."""
    import torch

    import devices
    from models.checkpoints.load import load_config, model_name, tokenizer_folder
    from models.tokenizer import ByteTokenizer, load_tokenizer
    from run.loading import Loading, scheme_of

    config = environment.use_threads(config)
    spec = scheme_of(config)
    device = devices.resolve(config.device)
    config = dataclasses.replace(config, device=str(device), quantization=str(spec))
    if config.memory_profile and device.type not in ("cuda", "cpu"):
        raise UsageError(f"--memory_profile works on cuda and cpu, not on {device.type}")
    architecture = load_config(config.checkpoint_path)
    if config.num_layers:
        architecture = architecture.with_layers(config.num_layers)
    vocab_size, folder = architecture.vocab_size, tokenizer_folder(config.checkpoint_path)
    tokenizer = load_tokenizer(folder, vocab_size) if folder else ByteTokenizer(vocab_size)
    check_name(config, model_name(config.checkpoint_path))
    if config.prefill_size:
        positions(config, config.prefill_size, architecture.max_position)
        generator = torch.Generator().manual_seed(config.seed)
        prompt = torch.randint(vocab_size, (config.prefill_size,), generator=generator).tolist()
    else:
        prompt = tokenizer.encode(config.prompt)
    return Plan(
        config=config,
        name=model_name(config.checkpoint_path),
        device=device,
        spec=spec,
        loading=Loading(config, spec, device, tokenizer),
        architecture=architecture,
        tokenizer=tokenizer,
        prompt=prompt,
        cache_size=positions(config, len(prompt), architecture.max_position),
    )


def positions(config: RunConfig, prompt: int, context: int) -> int:
    """How many positions the caches get; UsageError if the run cannot stay inside them."""
    if config.interactive:
        if config.context_depth:
            raise UsageError("--interactive begins at the beginning: leave out --context_depth")
        return config.cache_size or min(context, INTERACTIVE_CACHE)
    if prompt == 0:
        raise UsageError("--prompt is empty, and this tokenizer has no token to begin with")
    needed = config.context_depth + prompt + config.max_new_tokens
    asked = f"{prompt} prompt tokens and --max_new_tokens {config.max_new_tokens} need {needed}"
    if config.context_depth:
        asked = f"--context_depth {config.context_depth}, {asked}"
    if needed > context:
        raise UsageError(f"{asked} positions; the model's context has {context}: ask for fewer")
    if config.cache_size and config.cache_size < needed:
        raise UsageError(f"{asked} positions; --cache_size {config.cache_size} is too small")
    return config.cache_size or needed


def load(plan: Plan, report: Report) -> tuple[Transformer, dict[str, int]]:
    """The quantized model, and the peak memory of loading it; the compiler gets ready beside it."""
    import devices
    from run import compiling

    devices.reset_peak_memory(plan.device)
    alone = plan.spec.scheme is None  # kernels are timed meanwhile
    ready = compiling.begin(plan.device) if plan.config.compile and not alone else None
    model = plan.loading.load(report, say)
    if ready:
        ready()
    return model, devices.peak_memory(plan.device)


def dry_run(plan: Plan) -> str:
    """Sizes and kernels, from shapes alone."""
    from run import sizes

    config = plan.config
    return sizes.report(config, plan.architecture, plan.spec, plan.device, plan.cache_size)


def memory(plan: Plan) -> str:
    """What will be allocated, before any of it is; MemoryShortage if it cannot be."""
    import devices
    from run import sizes

    free = devices.free_memory(plan.device)
    return sizes.check_memory(
        plan.config, plan.architecture, plan.spec, plan.device, plan.cache_size, free
    )


def make_session(plan: Plan, model: Transformer) -> Session:
    import torch

    from run.session import Sampling, Session
    from run.sizes import kv_cache

    config = plan.config
    session = Session(
        model,
        Sampling(config.temperature, config.top_k),
        config.batch_size,
        plan.cache_size,
        compile_decode=config.compile,
        compile_prefill=config.compile_prefill,
        cache=kv_cache(config),
        prefill_chunk=config.prefill_chunk,
    )
    if reason := model.decode_kernel.reason:
        say(f"Attention over the KV cache runs on plain torch, which is slow: {reason}")
    if config.context_depth:
        with progress(f"Filling {config.context_depth} positions"):
            torch.manual_seed(config.seed)
            session.fill_randomly(config.context_depth)
    return session


def measure(plan: Plan, session: Session) -> dict[str, Any]:
    """Compile, warm up, take the samples; everything known about the run, ready for JSON."""
    import devices
    from run.tracing import trace

    config, device = plan.config, plan.device
    one_sample = sampler(plan, session)
    ready = get_ready(plan, session, one_sample, since=STARTED)
    memory = {"warm_up": devices.peak_memory(device)}
    devices.reset_peak_memory(device)
    samples, spoken = [], -math.inf
    for number in range(1, config.num_samples + 1):
        generation = one_sample(number - 1)
        samples.append(figures(generation, len(plan.prompt)))
        if config.num_samples <= 10 or time.monotonic() > spoken + 2:
            spoken = time.monotonic()
            say(f"Sample {number} of {config.num_samples}: {samples[-1]['tok_s']:.2f} tok/s")
    memory["generate"] = devices.peak_memory(device)
    trace(device, config.profile, config.memory_profile, lambda: one_sample(0), say)
    text = readable(plan, generation.tokens[0].tolist())
    found = {**facts(plan, session.model), **ready, "text": text, "peak_memory_bytes": memory}
    return {**found, **summary(found, samples), "samples": samples}


def sampler(plan: Plan, session: Session) -> Callable[..., Generation]:
    """A function of a sample's number that takes it; further arguments as Session.generate's."""
    import torch

    config = plan.config
    prompt = torch.tensor([plan.prompt] * config.batch_size, device=plan.device)

    def one_sample(index: int, tokens: int = config.max_new_tokens, **more: Any) -> Generation:
        torch.manual_seed(config.seed + index)  # a seed reproduces a sample, however long we warm
        return session.generate(prompt, tokens, config.context_depth, **more)

    return one_sample


def get_ready(
    plan: Plan,
    session: Session,
    one_sample: Callable[..., Generation],
    since: float | None = None,
) -> dict[str, Any]:
    """Compile and warm up; how long that took. The peak memory counts from here on.

    since: when the process started, where that is to be told.
    """
    import devices

    config = plan.config
    devices.reset_peak_memory(plan.device)
    compiling = config.compile or config.compile_prefill
    came: list[float] = []  # when each token did
    with progress("Compiling" if compiling else "First steps"):
        started = time.perf_counter()
        tokens = min(3, config.max_new_tokens)
        one_sample(0, tokens, after_token=lambda: came.append(time.perf_counter()))
        first_seconds = time.perf_counter() - started
    waited = {}
    if since is not None:
        waited = {"first_token_s": came[0] - since, "first_steps_s": came[-1] - since}
        line = f"From the start to the first token: {came[0] - since:.1f} s"
        if config.compile and tokens > 1:
            line += f"; to the first {tokens}, compilation included: {came[-1] - since:.1f} s"
        say(line)
    warm_ups, steady = warm_up(one_sample)
    return {
        **waited,
        "compile_seconds": first_seconds if compiling else None,
        "warm_ups": warm_ups,
        "warm_up_steady": steady,
    }


def facts(plan: Plan, model: Transformer) -> dict[str, Any]:
    """What is known of a run before its first sample, once its session was made."""
    import devices

    return {
        "config": dataclasses.asdict(plan.config),
        "model": plan.name,
        "architecture": dataclasses.asdict(plan.architecture),
        "scheme": str(plan.spec),
        "kernel": plan.loading.kernels,
        "prompt_tokens": len(plan.prompt),
        "cache_size": plan.cache_size,
        "weight_bytes": model.weight_bytes(),
        "kv_cache": model.caches[0].format,
        "attention_kernel": model.decode_kernel.name,
        "kv_cache_bytes": sum(cache.nbytes for cache in model.caches),
        "device": {"type": plan.device.type, **devices.describe(plan.device)},
        "environment": dataclasses.asdict(environment.in_force()),
        "versions": versions(),
        "git_commit": git_commit(),
    }


def summary(facts: dict[str, Any], samples: list[dict[str, Any]]) -> dict[str, Any]:
    """The samples in a few figures: tok/s is their mean, the others are medians."""
    tok_s = statistics.fmean(sample["tok_s"] for sample in samples)
    return {
        "tok_s": tok_s,
        "tok_s_all_rows": tok_s * facts["config"]["batch_size"],
        "prefill_tok_s": median(samples, "prefill_tok_s"),
        "decode_tok_s": median(samples, "decode_tok_s"),
        "time_to_first_token_s": median(samples, "prefill_seconds"),
        "weight_bytes_per_s": tok_s * facts["weight_bytes"],
    }


def warm_up(one_sample: Callable[[int], Generation]) -> tuple[list[float], bool]:
    """Sample until two in a row agree; their seconds, and whether two did.

    One warm-up is not enough: CUDA graphs are captured on the second call, and clocks, caches and
    page tables take their time.
    """
    seconds: list[float] = []
    steady = False
    with progress("Warming up"):
        while len(seconds) < MAX_WARM_UPS and not steady:
            generation = one_sample(len(seconds))
            seconds.append(generation.prefill_seconds + generation.decode_seconds)
            steady = len(seconds) > 1 and abs(seconds[-1] / seconds[-2] - 1) <= AGREEMENT
    count = len(seconds)
    if steady:
        say(f"Steady: warm-up samples {count - 1} and {count} agree within {AGREEMENT:.0%}")
    else:
        say(f"Not steady: no two in a row of {count} warm-up samples agree within {AGREEMENT:.0%}")
    return seconds, steady


def figures(generation: Generation, prompt_tokens: int) -> dict[str, float | None]:
    """Seconds and tokens per second of one sample, each row's; batches multiply them."""
    prefill, decode = generation.prefill_seconds, generation.decode_seconds
    new_tokens = generation.tokens.shape[1]
    return {
        "prefill_seconds": prefill,
        "decode_seconds": decode,
        "tok_s": new_tokens / (prefill + decode),
        "prefill_tok_s": prompt_tokens / prefill,
        "decode_tok_s": (new_tokens - 1) / decode if new_tokens > 1 else None,
    }


def median(samples: list[dict[str, Any]], name: str) -> float | None:
    values = [sample[name] for sample in samples if sample[name] is not None]
    return statistics.median(values) if values else None


def make_record(config: RunConfig, details: dict[str, Any]) -> Record:
    """The log line: GB are 1e9 bytes, and the peak is that of the counted samples."""
    peak = next(iter(details["peak_memory_bytes"]["generate"].values()))
    return Record(
        timestamp=time.strftime("%Y%m%d%H%M%S"),
        tok_s=details["tok_s"],
        mem_s=details["weight_bytes_per_s"] / 1e9,
        peak_mem=peak / 1e9,
        model_size=details["weight_bytes"] / 1e9,
        quant="None" if details["scheme"] == "none" else details["scheme"],
        mod=details["model"],
        kv_quant=details["kv_cache"] != "dense",
        compile=config.compile,
        compile_prefill=config.compile_prefill,
        dtype=f"torch.{config.precision}",
        device=config.device,
        repro=repro(dataclasses.replace(config, save=None)),  # it takes a new folder
    )


def chat(plan: Plan, session: Session) -> None:
    """What --interactive asks for."""
    import torch

    from run.chat import converse

    def next_tokens(ids: list[int], start: int) -> Iterator[int]:
        prompt = torch.tensor([ids], device=plan.device)
        return map(int, session.stream(prompt, start))

    torch.manual_seed(plan.config.seed)
    most = plan.config.max_new_tokens
    converse(next_tokens, plan.tokenizer, plan.name, plan.cache_size, most, say)


def readable(plan: Plan, tokens: list[int]) -> str | None:
    """Prompt and continuation up to where the model ended it; None where they are random."""
    config = plan.config
    if config.prefill_size or config.context_depth or config.checkpoint_path.startswith("dummy:"):
        return None
    eos = plan.tokenizer.eos_ids
    end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
    return plan.tokenizer.decode([*plan.prompt, *tokens[:end]])


if __name__ == "__main__":
    main()
