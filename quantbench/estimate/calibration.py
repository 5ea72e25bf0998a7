"""Which shares of a card's peak and bandwidth runs of a log, or of results in JSON, reached.

    efficiencies = of_file("benchmarks.txt", "A100")      # by scheme
    card("A100", efficiencies)

A line of a log has the seconds of whole runs, which are nearly all decoding: they give the share of
the bandwidth. Results in JSON (--output_json_path, ab) have those of prompts, too, and the card's
name. Runs that were not compiled are left out, for Python sets their speed.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from quantbench.errors import KernelError, QuantbenchError, UsageError
from quantbench.estimate.cards import A5000, Card, Efficiency, card
from quantbench.estimate.datasheets import known
from quantbench.estimate.predict import Request
from quantbench.estimate.validate import objects
from quantbench.log.config import RunConfig
from quantbench.log.options import of_repro
from quantbench.log.reading import config_of
from quantbench.log.reading import read as read_log
from quantbench.log.record import Record
from quantbench.models.loading import load_config
from quantbench.models.presets import preset
from quantbench.quantize.spec import parse_scheme
from quantbench.text import counted

ANOTHER_MODEL = 0.1  # deviation of log(estimated ÷ measured), assumed: same card, same scheme
LONG_PROMPT = 128  # tokens of all rows: fewer are bound by memory, as a step is
CHARACTERS = 4  # of a token of --prompt, whose tokenizer is elsewhere


@dataclass(frozen=True)
class Run:
    """A measured run. Seconds; prompt and token are None where only the whole is known."""

    request: Request
    whole: float
    prompt: float | None = None
    token: float | None = None
    card: str | None = None  # its name, where the file has it


def of_file(path: str, measured_on: str) -> dict[str, Efficiency]:
    """Efficiencies by scheme. measured_on: the card of runs that name none.

    Raises QuantbenchError, one line, for a file without any run that can be used.
    """
    by_scheme: dict[str, list[tuple[float, float | None]]] = {}
    for run in runs(path):
        if run.card is not None and known(run.card) is None:
            continue
        where = card(run.card or measured_on)
        try:
            by_scheme.setdefault(run.request.scheme, []).append(_shares(run, where))
        except (KernelError, UsageError):  # a model that the scheme or the ranks do not take
            continue
    if not by_scheme:
        raise QuantbenchError(
            f"--calibration {path}: it has no compiled run on a card whose scheme and model are "
            "known; give a log, what --output_json_path wrote, or results.json of ab"
        )
    return {scheme: _pooled(shares, path, measured_on) for scheme, shares in by_scheme.items()}


def _pooled(shares: list[tuple[float, float | None]], path: str, measured_on: str) -> Efficiency:
    products = [share for _, share in shares if share is not None]
    source = f"as in {counted(len(shares), 'run')} of {path} on {card(measured_on).name}"
    if not products:
        source += f"; products {A5000.source}"
    return Efficiency(
        statistics.geometric_mean(products) if products else A5000.arithmetic,
        statistics.geometric_mean(memory for memory, _ in shares),
        ANOTHER_MODEL,
        source,
    )


def _shares(run: Run, where: Card) -> tuple[float, float | None]:
    """Shares of the bandwidth and, of a long prompt whose seconds are known, of the peak."""
    request, counts = run.request, where.counts(run.request)

    def seconds(phase: int, **shares: Any) -> float:
        return where.phase(request, counts[phase], replace(A5000, **shares)).seconds

    if run.token is not None:
        memory = _share(lambda share: seconds(1, memory=share), run.token)
    else:
        steps = request.new_tokens - 1
        memory = _share(
            lambda share: seconds(0, memory=share) + steps * seconds(1, memory=share), run.whole
        )
    if run.prompt is None or request.batch * request.prompt < LONG_PROMPT:
        return memory, None
    return memory, _share(lambda share: seconds(0, memory=memory, arithmetic=share), run.prompt)


def _share(seconds: Callable[[float], float], measured: float) -> float:
    """The share, from 0.1 % to twice the data sheet, at which a run takes as long as measured."""
    low, high = 0.001, 2.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) > measured else (low, middle)
    return low


# ---------------------------------------------------------------------------------- files


def runs(path: str) -> list[Run]:
    """The compiled runs of a log, or of a file of JSON, whose scheme and architecture are known."""
    try:
        found = list(_of_json(path))
    except ValueError:
        records = [record for _, record in read_log(path).records]
        found = [run for record in records if record.device != "cpu" for run in _of_line(record)]
    return found


def _of_line(record: Record) -> Iterator[Run]:
    if (request := _request(config_of(record), record.mod)) is not None:
        yield Run(request, whole=request.new_tokens / record.tok_s)


def _of_json(path: str) -> Iterator[Run]:
    """Every object with the speed of decoding and the command of its run. Raises ValueError for a
    file that is not JSON."""
    for content, above in objects(path):
        line, command = content.get("line"), content.get("command")
        speed, prompt = content.get("decode_tok_s"), content.get("time_to_first_token_s")
        if not isinstance(speed, float) or not isinstance(prompt, float) or speed <= 0:
            continue
        try:
            config = of_repro(command) if command else config_of(Record.parse(str(line)))
        except QuantbenchError:
            continue
        if (request := _request(config, content.get("model"))) is not None:
            whole = prompt + (request.new_tokens - 1) / speed
            yield Run(request, whole, prompt, 1 / speed, above.get("device"))


def _request(config: RunConfig, model: Any) -> Request | None:
    """None for a run that was not compiled, or whose scheme or architecture is not known."""
    if not config.compile:
        return None
    try:
        try:
            architecture = preset(str(model))
        except UsageError:
            architecture = load_config(config.checkpoint_path)
        if config.num_layers:
            architecture = architecture.with_layers(config.num_layers)
        scheme = str(parse_scheme(config.quantization))
    except QuantbenchError:
        return None
    prompt = config.prefill_size or 1 + len(config.prompt) // CHARACTERS
    return Request(
        architecture, scheme, "int8" if config.kv_cache_quantization else config.kv_cache,
        config.batch_size, prompt, config.max_new_tokens, config.tp, config.context_depth,
        config.precision,
    )  # fmt: skip
