"""What a run was asked to do: `RunConfig`, whose fields are the only list of options there is.

From the fields come the click options and the reading of a command line (log/options.py), and its
writing. So the command in every log line can be pasted and gives the same run:

    repro(RunConfig(quantization="int8wo"))
    # python generate.py --quantization int8wo --checkpoint_path tiny …

Options are spelled with underscores; dashes are read too. A value that starts with a dash is
given as --prompt=VALUE.
"""

import dataclasses
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from quantbench.errors import UsageError
from quantbench.kv_cache import CACHES
from quantbench.log import shell
from quantbench.log.kinds import Kind, Number, OneOf, Room, Switch, Text, Whole
from quantbench.text import key, shown

PROGRAM = ("python", "generate.py")


@dataclass(frozen=True)
class Option:
    """One row of the table of options: what belongs to a field of RunConfig."""

    kind: Kind  # how its value is read, checked and written
    group: str  # the section of --help: MODEL, SPEED, …
    help: str
    always: bool = False  # whether the repro command has it even at its default (see `argv`)


# The sections of --help, in the order in which RunConfig has them.
MODEL, SPEED, SAMPLE, CACHE, EXPERTS, OUTPUT = (
    "Model", "Speed", "Sample", "Cache", "Experts", "Output",
)  # fmt: skip
PRECISIONS = ("bfloat16", "float16", "float32")
ALIASES = {"precision": "dtype"}  # other names of options
KERNELS = ("auto", "torchao", "cpu", "inductor", "triton", "bitsandbytes", "reference", "torch")
DECODERS = ("auto", "cpu-step", "modules")
FORMER_DECODERS = ("cpu-stack", "cpu-layer")  # of old logs
SPECULATION = ("off", "lookup", "self", "draft")
FORMATS = ("quantbench", "compressed-tensors", "torchao", "gguf")
EXPERT_POLICIES = ("auto", "fetch", "compute_there", "cache")
EXPERT_PREFETCH = ("auto", "router", "off")  # of old logs; a run accepts auto alone
# Options that a comparison decides itself, or that concern one run alone.
NOT_IN_ARMS = (
    *("num_samples", "write_result", "output_json_path", "profile", "memory_profile"),
    *("save", "format", "dry_run", "interactive", "debug"),
)
NOT_TIMED = (*NOT_IN_ARMS, "kv_cache_quantization", "linear_causal_mask")  # kv_cache has the first


class Unsaid(str):
    """A default value. The type distinguishes it from the same text given on the command line."""

    __slots__ = ()


def _field(default: object, group: str, kind: Kind, help: str, always: bool = False) -> Any:
    return dataclasses.field(
        default=default, metadata={"option": Option(kind, group, help, always)}
    )


@dataclass(frozen=True)
class RunConfig:
    """The options of one run of generate.py, checked, in the order that the repro command has.

    A value may be given as its text on the command line: RunConfig(top_k="50").top_k == 50.
    Raises UsageError, one line, for a value that its option does not accept.
    """

    # fmt: off
    quantization: str = _field(Unsaid("none"), MODEL, Text("SCHEME"),
        "Quantization scheme; `quantbench schemes` lists them")
    checkpoint_path: str = _field("tiny", MODEL, Text("PATH"),
        "Folder, GGUF file, model.pth, hub id, dummy:NAME, tiny or tiny_moe",
        always=True)
    device: str = _field("auto", MODEL, Text("DEVICE"), "cpu, cuda, xpu, mps, or auto",
        always=True)
    precision: str = _field("bfloat16", MODEL, OneOf(PRECISIONS, prefix="torch."),
        "Unquantized dtype: " + ", ".join(PRECISIONS), always=True)
    compile: bool = _field(False, SPEED, Switch(), "Compile the decoding step")
    compile_prefill: bool = _field(False, SPEED, Switch(), "Compile the prefill, too")
    num_samples: int = _field(5, SAMPLE, Whole(1), "Samples to measure, after the warm-up",
        always=True)
    max_new_tokens: int = _field(200, SAMPLE, Whole(1), "New tokens per sample", always=True)
    top_k: int = _field(200, SAMPLE, Whole(1), "Draw from the N most probable tokens", always=True)
    temperature: float = _field(0.8, SAMPLE, Number(), "0 takes the most probable token",
        always=True)
    cache_size: int | None = _field(None, CACHE, Whole(1),
        "Positions in the KV cache; default: as many as the run needs")
    kv_cache_quantization: bool = _field(False, CACHE, Switch(), "The same as --kv_cache int8")
    kv_cache: str = _field("dense", CACHE, OneOf(tuple(CACHES)),
        "Format of the KV cache: " + ", ".join(CACHES))
    linear_causal_mask: bool = _field(False, CACHE, Switch(),
        "Has no effect; accepted because old logs contain it")
    prefill_chunk: int | None = _field(None, CACHE, Whole(1),
        "Prompt tokens of a row per pass; default on the CPU: 512 of all rows")
    context_depth: int = _field(0, CACHE, Whole(0),
        "Pretend that N tokens are already in the KV cache (random ones)")
    prompt: str = _field("Hello, my name is", SAMPLE, Text(may_be_empty=True), "Text to continue")
    prefill_size: int | None = _field(None, SAMPLE, Whole(1),
        "Use a prompt of N random tokens instead of --prompt")
    batch_size: int = _field(1, SAMPLE, Whole(1), "Sequences generated in parallel")
    seed: int = _field(1234, SAMPLE, Whole(0), "Random seed")
    num_layers: int | None = _field(None, MODEL, Whole(1), "Use only the first N layers")
    kernel: str = _field("auto", SPEED, OneOf(KERNELS),
        "Kernel: auto, cpu, triton, torch, torchao, or a package's")
    decoder: str = _field("auto", SPEED, OneOf(DECODERS, former=FORMER_DECODERS),
        "Decoding step run by: " + ", ".join(DECODERS))
    speculate: str = _field("off", SPEED, OneOf(SPECULATION),
        "Draft tokens: off, lookup, self (fewer bits), draft (a model)")
    draft_quantization: str | None = _field(None, SPEED, Text("SCHEME"),
        "The draft's scheme [int4wo-64 for self; else as its file is]")
    draft_checkpoint: str | None = _field(None, SPEED, Text("PATH"),
        "Model of --speculate draft, of the same tokens")
    min_sqnr: float = _field(35.0, MODEL, Number(), "autoquant: lowest SQNR to accept, in dB")
    calibration_text: str | None = _field(None, MODEL, Text("PATH"),
        "Text to calibrate on; default: the embedded one")
    threads: int | None = _field(None, SPEED, Whole(1, maximum=1024),
        "CPU threads; default: one for each core that the process may use")
    tp: int = _field(1, SPEED, Whole(1, maximum=1024),
        "Processes that share the model: tensor parallelism")
    expert_memory: str | None = _field(None, EXPERTS, Room(),
        "Experts in two tiers: room in the fast one (8GB, a number, auto)")
    expert_placement: str = _field("uniform", EXPERTS, Text("NAME"),
        "In fast memory at first: popularity, uniform, first, or a file")
    expert_policy: str = _field("auto", EXPERTS, OneOf(EXPERT_POLICIES),
        "What happens to others: " + ", ".join(EXPERT_POLICIES))
    expert_prefetch: str = _field("auto", EXPERTS, OneOf(EXPERT_PREFETCH),
        "Only auto; accepted because old logs contain it")
    expert_folder: str | None = _field(None, EXPERTS, Text("DIR"),
        "Disk for slow memory; default: quantbench's cache folder")
    save: str | None = _field(None, OUTPUT, Text("DIR"), "Write the quantized model to this folder")
    format: str = _field("quantbench", OUTPUT, OneOf(FORMATS),
        "Of --save: " + ", ".join(FORMATS))
    dry_run: bool = _field(False, OUTPUT, Switch(),
        "Show sizes, memory and kernels; load and run nothing")
    write_result: str = _field("benchmarks.txt", OUTPUT, Text("PATH"),
        "Log to append one line to; none writes no line")
    output_json_path: str | None = _field(None, OUTPUT, Text("PATH"),
        "Append all measurements to this file, as one line of JSON")
    profile: str | None = _field(None, OUTPUT, Text("PATH"), "Write a profiler trace to this file")
    memory_profile: str | None = _field(None, OUTPUT, Text("PATH"),
        "Write a memory snapshot to this file")
    interactive: bool = _field(False, SAMPLE, Switch(), "Chat with the model; nothing is logged")
    debug: bool = _field(False, OUTPUT, Switch(), "Show tracebacks and library warnings")
    # fmt: on

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), field.metadata["option"].kind
            if (value is None and field.default is None) or isinstance(value, Unsaid):
                continue
            object.__setattr__(self, field.name, kind.of(f"--{field.name}", value))

    def differs(self, name: str) -> bool:
        """Whether this option has another value than its default."""
        return bool(getattr(self, name) != getattr(RunConfig, name))

    def without(self, names: Collection[str]) -> "RunConfig":
        """The same with these options at their defaults."""
        usual: dict[str, Any] = {name: getattr(RunConfig, name) for name in names}
        return dataclasses.replace(self, **usual)


def refuse_former(config: RunConfig) -> None:
    """Raise UsageError for a name that only old logs have."""
    for name, option in option_table().items():
        value = getattr(config, name)
        if isinstance(option.kind, OneOf) and value in option.kind.former:
            raise UsageError(f"--{name} takes {option.kind.accepts}; given: {shown(value)}")


def option_table() -> dict[str, Option]:
    """Every option by its underscore name, in the order of the repro command."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(RunConfig)}


def argv(config: RunConfig, said: bool = False, always: Collection[str] | None = None) -> list[str]:
    """Arguments that `parse` turns back into the config.

    Options marked `always` are written even at their defaults, so that a default changed later does
    not change what an old line means. The others are written where they differ from the default.

    said: write --quantization none, too, where it was given. Log lines leave it out.
    always: names of options to write even at their defaults, instead of those marked.
    """
    arguments: list[str] = []
    for field in dataclasses.fields(config):
        option, value = field.metadata["option"], getattr(config, field.name)
        names_default = said and isinstance(field.default, Unsaid) and not isinstance(value, Unsaid)
        written = option.always if always is None else field.name in always
        if value == field.default and not written and not names_default:
            continue
        text = option.kind.write(value)
        if isinstance(option.kind, Switch):
            arguments += [f"--{field.name}"]
        elif text.startswith("-"):
            arguments += [f"--{field.name}={text}"]
        else:
            arguments += [f"--{field.name}", text]
    return arguments


def repro(config: RunConfig, said: bool = False) -> str:
    """The command that repeats the run, always one line; bash and `split` read it back. said: as
    for `argv`."""
    if config.tp == 1:
        return shell.join([*PROGRAM, *argv(config, said)])
    ranks = ("torchrun", "--nproc_per_node", str(config.tp), "generate.py")
    return shell.join([*ranks, *argv(dataclasses.replace(config, tp=1), said)])


def split(command: str) -> list[str]:
    """The words of a repro command, after inserting the space that some old lines lack.

    Logs of 2024 hold `--cache_size 8192--kv_cache_quantization`. Only an unquoted word in the place
    of a number is split, since there it can mean nothing else.
    Raises UsageError for a quote that is not closed.
    """
    return _mended(shell.words(command))


def has_glued_option(command: str) -> bool:
    """Whether `split` inserts a missing space."""
    words = shell.words(command)
    return len(_mended(words)) > len(words)


def breaks_off(command: str) -> bool:
    """Whether a repro command visibly lacks its end, because its writer was killed.

    A cut inside the last value, or between two of the last options, cannot be recognized.
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
        return not isinstance(options[key(last)].kind, Switch)
    begun = last.replace("-", "_")
    return any(f"__{name}".startswith(begun) for name in options)


def _mended(words: Sequence[shell.Word]) -> list[str]:
    names = option_table()
    numeric = {name for name, option in names.items() if isinstance(option.kind, Whole | Number)}
    spellings = "|".join(names).replace("_", "[-_]")
    glued = re.compile(rf"([0-9.]+)((?:--(?:{spellings}))+)")
    result: list[str] = []
    for word in words:
        before = result[-1] if result else ""
        match = glued.fullmatch(word.text) if word.bare else None
        if match and before.startswith("--") and key(before) in numeric:
            result += [match[1], *(f"--{name}" for name in match[2].split("--")[1:])]
        else:
            result.append(word.text)
    return result
