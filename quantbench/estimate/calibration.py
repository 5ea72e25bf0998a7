"""Measured runs on cards, from a log or from results in JSON: what a card's shares are fitted to.

    card("A100", runs("benchmarks.txt", "A100"))

A line of a log has the seconds of a whole run, which is nearly all decoding. Results in JSON
(--output_json_path, ab) have those of prompts, too, and the card's name; so have cases as
--validate takes them. Runs that were not compiled are left out, for Python sets their speed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from quantbench.errors import QuantbenchError, UsageError
from quantbench.estimate.cards import Run
from quantbench.estimate.datasheets import find, known
from quantbench.estimate.predict import Request
from quantbench.estimate.validate import objects
from quantbench.log.config import RunConfig
from quantbench.log.log import config_of
from quantbench.log.log import read as read_log
from quantbench.log.options import of_repro
from quantbench.log.record import Record
from quantbench.models.config import ModelConfig
from quantbench.models.loading import load_config
from quantbench.models.presets import preset
from quantbench.progress import say
from quantbench.quantize.spec import parse_scheme
from quantbench.text import counted
from quantbench.typed_json import LARGEST_MEASURED

MOST = 1 << 24  # positions, or sequences, of a case
CHARACTERS = 4  # of a token of --prompt, whose tokenizer is elsewhere


def runs(path: str, measured_on: str) -> list[Run]:
    """The compiled runs whose scheme and architecture are known. measured_on: the card of those
    that name none. Raises QuantbenchError, one line, for a file without any."""
    assumed = find(measured_on).name
    try:
        found = list(_of_json(path, assumed))
    except ValueError:
        found = _of_log(path, assumed)
    if not found:
        raise QuantbenchError(
            f"--calibration {path}: it has no compiled run on a card whose scheme and model are "
            "known; give a log, what --output_json_path wrote, or results.json of ab"
        )
    return found


def _of_log(path: str, card: str) -> list[Run]:
    log = read_log(path)
    if log.bad:
        say(f"{path}: left out: {counted(len(log.bad), 'damaged line')}")
    source = f"{path}, taken to have run on {card}"
    bad = {number for number, _ in log.bad}
    found = []
    for number, record in log.records:
        compiled = record.compile and number not in bad
        request = request_of(config_of(record), record.mod) if compiled else None
        if request is not None and record.device != "cpu" and record.tok_s > 0:
            found.append(Run(request, card, request.new_tokens / record.tok_s, source=source))
    return found


def _of_json(path: str, assumed: str) -> Iterator[Run]:
    """Every object with the command of a run and its speed of decoding, and every measured case.
    Raises ValueError for a file that is not JSON."""
    for content, above in objects(path):
        sheet = known(above.get("device", assumed))
        if sheet is None:
            continue
        source = f"{path} on {sheet.name}"
        seconds, kind = content.get("measured_seconds"), content.get("kind", "prompt")
        if is_measured(seconds) and kind in ("prompt", "token"):
            if (case := _case(above)) is not None:
                yield Run(case, sheet.name, **{kind: seconds}, source=source)
            continue
        speed, prompt = content.get("decode_tok_s"), content.get("time_to_first_token_s")
        if not (is_measured(speed) and is_measured(prompt)):
            continue
        config = config_of_run(content)
        if config is None or not content.get("compiled_step", config.compile):
            continue
        if (request := request_of(config, content.get("model"))) is not None:
            yield Run(request, sheet.name, prompt=prompt, token=1 / speed, source=source)


def config_of_run(content: dict[str, Any]) -> RunConfig | None:
    """The options by the command, or the line of the log, in a run's JSON; None without either."""
    line, command = content.get("line"), content.get("command")
    try:
        return of_repro(command) if command else config_of(Record.parse(str(line)))
    except QuantbenchError:
        return None


def is_measured(value: object) -> TypeGuard[float]:
    """Whether a value of a file can be seconds or a speed."""
    return type(value) in (int, float) and 0 < value < LARGEST_MEASURED  # type: ignore[operator]


def request_of(config: RunConfig, model: Any) -> Request | None:
    """None for a run whose scheme or architecture is not known."""
    try:
        try:
            architecture = preset(str(model))
        except UsageError:
            architecture = load_config(config.checkpoint_path)
        architecture = architecture.with_layers(config.num_layers)
        scheme = str(parse_scheme(config.quantization))
    except QuantbenchError:
        return None
    prompt = config.prefill_size or 1 + len(config.prompt) // CHARACTERS
    kv_cache = "int8" if config.kv_cache_quantization else config.kv_cache
    return Request.of(config, architecture, scheme, prompt, kv_cache=kv_cache)


def _case(above: dict[str, Any]) -> Request | None:
    """A prompt of `positions`, or a step behind them; None where the model is not known."""
    name = str(above.get("model", ""))
    try:
        scheme, architecture = str(parse_scheme(above.get("scheme", "none"))), _architecture(name)
    except QuantbenchError:
        return None
    positions, batch = above.get("positions", 128), above.get("batch", 1)
    if not (0 < positions <= MOST and 0 < batch <= MOST):
        return None
    return Request(architecture, scheme, batch=batch, prompt=positions, new_tokens=0)


def _architecture(name: str) -> ModelConfig | str:
    """A preset, or a config.json; its path where only transformers understands it."""
    try:
        return load_config(f"dummy:{name}")
    except QuantbenchError:
        if not Path(name).is_file():
            raise
        return name
