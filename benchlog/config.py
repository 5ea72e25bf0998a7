"""What a run was asked to do: `RunConfig`, whose fields are the only list of options there is.

The fields give the click options (`options`), read a command line (`parse`), and write it back
(`argv`, `repro`), so that every line in the log can be pasted and gives the same run:

    config = parse(["--quantization", "int8wo", "--compile"])
    repro(config)       # python generate.py --quantization int8wo --checkpoint_path tiny …

Options are spelled with underscores; dashes are read too. A value that begins with a dash is
given as --prompt=VALUE.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from benchlog import shell
from benchlog.kinds import Choice, Kind, Number, Switch, Text, Whole
from cli import GROUPS, TableOption, key, pairs
from errors import UsageError
from ops import names
from text import shown

PROGRAM = ("python", "generate.py")


@dataclass(frozen=True)
class Option:
    """One row of the table. `always`: written even at its default, see `argv`."""

    kind: Kind
    group: str
    help: str
    always: bool = False


MODEL, SPEED, SAMPLE, CACHE, OUTPUT = GROUPS
PRECISIONS = ("bfloat16", "float16", "float32")
KERNELS = ("auto", *names.KERNELS)
DECODERS = ("auto", *names.DECODERS)


class Unsaid(str):
    """A default that is told apart from the same text given on the command line."""

    __slots__ = ()


def _field(default: object, group: str, kind: Kind, help: str, always: bool = False) -> Any:
    return dataclasses.field(
        default=default, metadata={"option": Option(kind, group, help, always)}
    )


@dataclass(frozen=True)
class RunConfig:
    """One run of generate.py, checked. Fields stand in the order the repro line has them.

    A value may be given as its text on the command line: RunConfig(top_k="50").top_k == 50.
    Raises UsageError, one line, for a value outside what its option takes.
    """

    # fmt: off
    quantization: str = _field(Unsaid("none"), MODEL, Text("SCHEME"),
        "Scheme; `python -m quantize` lists them")
    checkpoint_path: str = _field("tiny", MODEL, Text("PATH"),
        "Folder, model.pth, hub id, dummy:NAME, or tiny, the embedded model", always=True)
    device: str = _field("auto", MODEL, Text("DEVICE"), "cpu, cuda, xpu, mps; auto picks one",
        always=True)
    precision: str = _field("bfloat16", MODEL, Choice(PRECISIONS, prefix="torch."),
        "Of whatever is not quantized: " + ", ".join(PRECISIONS), always=True)
    compile: bool = _field(False, SPEED, Switch(), "Compile the decoding step")
    compile_prefill: bool = _field(False, SPEED, Switch(), "Compile the prefill as well")
    num_samples: int = _field(5, SAMPLE, Whole(1), "Samples that count", always=True)
    max_new_tokens: int = _field(200, SAMPLE, Whole(1), "Tokens per sample", always=True)
    top_k: int = _field(200, SAMPLE, Whole(1), "Sample from the N likeliest tokens", always=True)
    temperature: float = _field(0.8, SAMPLE, Number(), "0 always takes the likeliest", always=True)
    cache_size: int | None = _field(None, CACHE, Whole(1), "Positions; otherwise what is needed")
    kv_cache_quantization: bool = _field(False, CACHE, Switch(), "The same as --kv_cache int8")
    kv_cache: str = _field("dense", CACHE, Choice(names.KV_CACHES),
        ", ".join(names.KV_CACHES))
    linear_causal_mask: bool = _field(False, CACHE, Switch(), "Changes nothing; old lines have it")
    prefill_chunk: int | None = _field(None, CACHE, Whole(1),
        "Prompt positions at once; otherwise the device's")
    context_depth: int = _field(0, CACHE, Whole(0),
        "Begin behind N positions of random keys and values")
    prompt: str = _field("Hello, my name is", SAMPLE, Text(may_be_empty=True), "Text to go on from")
    prefill_size: int | None = _field(None, SAMPLE, Whole(1), "A random prompt of N tokens instead")
    batch_size: int = _field(1, SAMPLE, Whole(1), "Rows generated at once")
    seed: int = _field(1234, SAMPLE, Whole(0), "Of sampling and of random prompts")
    num_layers: int | None = _field(None, MODEL, Whole(1), "Keep only the first N layers")
    kernel: str = _field("auto", SPEED, Choice(KERNELS), ", ".join(KERNELS))
    decoder: str = _field("auto", SPEED, Choice(DECODERS),
        "How a step is carried out: " + ", ".join(DECODERS))
    min_sqnr: float = _field(35.0, MODEL, Number(), "Least SQNR, dB, that autoquant accepts")
    calibration_text: str | None = _field(None, MODEL, Text("PATH"),
        "Calibrate on it; otherwise on embedded text")
    threads: int | None = _field(None, SPEED, Whole(1, maximum=1024),
        "Threads; otherwise a core each, of those that the process may use")
    save: str | None = _field(None, OUTPUT, Text("DIR"), "Write the quantized model here")
    dry_run: bool = _field(False, OUTPUT, Switch(), "Sizes and kernels from shapes alone; no run")
    write_result: str = _field("benchmarks.txt", OUTPUT, Text("PATH"),
        "Log to append one line to, or none")
    output_json_path: str | None = _field(None, OUTPUT, Text("PATH"), "Append every sample here")
    profile: str | None = _field(None, OUTPUT, Text("PATH"), "Write a profiler trace here")
    memory_profile: str | None = _field(None, OUTPUT, Text("PATH"), "Write a memory snapshot here")
    interactive: bool = _field(False, SAMPLE, Switch(), "Chat; nothing is logged")
    debug: bool = _field(False, OUTPUT, Switch(), "Show tracebacks and library warnings")
    # fmt: on

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), field.metadata["option"].kind
            if (value is None and field.default is None) or isinstance(value, Unsaid):
                continue
            try:
                object.__setattr__(self, field.name, kind.read(value))
            except ValueError:
                raise UsageError(
                    f"--{field.name} takes {kind.accepts}; given: {shown(value)}"
                ) from None


def option_table() -> dict[str, Option]:
    """Every option by its underscore name, in the order of the repro line."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(RunConfig)}


def parse(argv: Sequence[str]) -> RunConfig:
    """The run that these arguments of generate.py ask for; of an option given twice, the last.

    Raises UsageError, one line, for an unknown option, a missing value or one out of range.
    """
    takes_value = {name: not _is_switch(option) for name, option in option_table().items()}
    given: dict[str, Any] = dict(pairs(argv, takes_value))
    return RunConfig(**given)


def argv(config: RunConfig, said: bool = False) -> list[str]:
    """Arguments that `parse` turns back into the config.

    The options that old logs always wrote are written even at their defaults, so that a default
    changed later does not change what an old line means; the others where they differ. `said`:
    --quantization none, too, where it was given; log lines say full precision by leaving it out.
    """
    arguments: list[str] = []
    for field in dataclasses.fields(config):
        option, value = field.metadata["option"], getattr(config, field.name)
        given = said and isinstance(field.default, Unsaid) and not isinstance(value, Unsaid)
        if value == field.default and not option.always and not given:
            continue
        text = option.kind.write(value)
        if _is_switch(option):
            arguments += [f"--{field.name}"]
        elif text.startswith("-"):
            arguments += [f"--{field.name}={text}"]
        else:
            arguments += [f"--{field.name}", text]
    return arguments


def repro(config: RunConfig) -> str:
    """The command that repeats the run, always one line; bash and `split` read it back."""
    return shell.join([*PROGRAM, *argv(config)])


def split(command: str) -> list[str]:
    """The words of a repro line; an option glued to the number before it is taken apart.

    Logs of 2024 hold `--cache_size 8192--kv_cache_quantization`. Only an unquoted word where a
    number has to stand is mended, since there it can mean nothing else.
    Raises UsageError where a quote is not closed.
    """
    return _mended(shell.words(command))


def has_glued_option(command: str) -> bool:
    """Whether `split` has something to mend."""
    words = shell.words(command)
    return len(_mended(words)) > len(words)


def breaks_off(command: str) -> bool:
    """Whether a repro line visibly lacks its end, as one does whose writer was killed.

    A line cut inside its last value, or between two of its last options, cannot be told from a
    whole one.
    """
    try:
        words = split(command)
    except UsageError:
        return True
    options = option_table()
    present = {key(word.partition("=")[0]) for word in words if word.startswith("--")}
    if any(option.always and name not in present for name, option in options.items()):
        return True
    last = words[-1]
    if not last.startswith("-") or "=" in last:
        return False
    if key(last) in options:
        return not _is_switch(options[key(last)])
    begun = last.replace("-", "_")
    return any(f"__{name}".startswith(begun) for name in options)


Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def options(without: Collection[str] = ()) -> Callable[[Decorated], Decorated]:
    """Decorate a click command's function with every option; it receives RunConfig's arguments.

    Values arrive as text, RunConfig checks them. Use it under `@click.command(cls=cli.Command)`.
    """

    def decorate(function: Decorated) -> Decorated:
        for field in reversed(dataclasses.fields(RunConfig)):
            if field.name not in without:
                function = _click_option(field)(function)
        return function

    return decorate


def _click_option(field: "dataclasses.Field[Any]") -> Callable[[Decorated], Decorated]:
    option: Option = field.metadata["option"]
    spellings = dict.fromkeys([f"--{field.name}", f"--{field.name.replace('_', '-')}"])
    settings: dict[str, Any] = {"default": field.default, "help": option.help}
    if _is_switch(option):
        settings["is_flag"] = True
    else:
        settings |= {"type": click.UNPROCESSED, "metavar": option.kind.metavar}
    return click.option(field.name, *spellings, cls=TableOption, group=option.group, **settings)


def _is_switch(option: Option) -> bool:
    return isinstance(option.kind, Switch)


def _mended(words: Sequence[shell.Word]) -> list[str]:
    names = option_table()
    numeric = {name for name, option in names.items() if isinstance(option.kind, Whole | Number)}
    spellings = "|".join(names).replace("_", "[-_]")
    glued = re.compile(rf"([0-9.]+)((?:--(?:{spellings}))+)")
    result: list[str] = []
    for word in words:
        before = result[-1] if result else ""
        found = glued.fullmatch(word.text) if word.bare else None
        if found and before.startswith("--") and key(before) in numeric:
            result += [found[1], *(f"--{name}" for name in found[2].split("--")[1:])]
        else:
            result.append(word.text)
    return result
