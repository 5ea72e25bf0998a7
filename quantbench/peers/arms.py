"""The arms of `quantbench peers`: one of our schemes, and the peers that it is compared with.

arms = make_arms(config, of_runtimes("int8wo", ["llama.cpp"]), folder, threads=2)
Process(command(threads=2)(1))       # of the first peer; 0 is ours
"""

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from quantbench.bench import process
from quantbench.bench.process import Process
from quantbench.bench.store import ArmResult
from quantbench.errors import UsageError
from quantbench.log.config import RunConfig, argv
from quantbench.progress import say
from quantbench.text import shown
from quantbench.typed_json import to_json

WORKER = (sys.executable, "-m", "quantbench.peers.worker")
# Programs by their name in --runtimes. The first is there without an option that names it.
RUNTIMES = ("transformers", "llama.cpp", "ik_llama.cpp")
DEFAULT = RUNTIMES[:1]
ON_A_CARD = ("transformers",)
OPTIONS = {"llama.cpp": "--llama_cpp", "ik_llama.cpp": "--ik_llama"}
PACKAGES = {"transformers": "transformers", "transformers, unpacked": "accelerate"}
# Arms that read a GGUF file. transformers unpacks it to bfloat16: its kernels are for cards.
FILE_READERS = ("llama.cpp", "ik_llama.cpp", "transformers, unpacked")
# Schemes of which the others get a file of the same weights, and those that read the very file.
WRITTEN = ("none", "int8wo", "fp6", "int4wo-128")
SAME_FILE = ("gguf-Q4_0", "gguf-Q8_0", "gguf-Q6_K")
# For each scheme the peers that it is compared with, as (arm, format); cheap ones first.
PEERS: dict[str, Sequence[tuple[str, str]]] = {
    "none": (
        ("transformers", ""),
        ("llama.cpp", "BF16"),
        ("ik_llama.cpp", "BF16"),
        ("transformers, compiled", ""),
    ),
    "int8wo": [(name, "Q8_0") for name in FILE_READERS[:2]],
    "fp6": [(name, "Q6_K") for name in FILE_READERS[:2]],
    "int4wo-128": [(name, "Q4_0") for name in FILE_READERS[:2]],
    **{name: [(one, name.removeprefix("gguf-")) for one in FILE_READERS] for name in SAME_FILE},
    "as-is": [(name, "") for name in FILE_READERS],
}
# Seconds for 10^9 weights on two cores: to write a file, and to load and warm up a program.
WRITING = {"BF16": 30, "Q8_0": 25, "Q6_K": 35, "Q4_0": 25}
LOADING = 15


@dataclass(frozen=True)
class PeerWork:
    """Read `prompt` tokens at once, then make `new` tokens one by one: what every runtime does."""

    runtime: str  # a key of peers.runtimes.RUNTIMES
    prompt: int
    new: int
    threads: int
    checkpoint: str  # as in generate.py
    seed: int = 1234
    num_layers: int | None = None  # as in generate.py
    file: str = ""  # the GGUF of the checkpoint, for those that read one
    form: str = ""  # of the file: it is written where it is missing
    program: str = ""  # that the user named
    device: str = "cpu"
    rows: int = 1  # of a batch


def missing(runtime: str) -> str:
    """What to install for an arm of that name."""
    package = PACKAGES[runtime.split(",")[0]]
    return f"{runtime} needs more packages: pip install '.[peers]' ({package} is missing)"


def chosen_runtimes(given: Sequence[str], programs: Mapping[str, str]) -> list[str]:
    """The names of --runtimes, or the default ones. programs: by name those that an option names.

    Raises UsageError where one lacks its option or its package, and for an option without use.
    """
    chosen = [*given] or [*DEFAULT, *programs]
    for name, option in OPTIONS.items():
        if name in chosen and name not in programs:
            raise UsageError(f"--runtimes {name}: name its program with {option} PATH")
        if name in programs and name not in chosen:
            raise UsageError(f"{option}: --runtimes leaves {name} out")
        if name in programs and shutil.which(programs[name]) is None:
            raise UsageError(f"{option} {shown(programs[name])}: there is no such program")
    for name in chosen:
        if not _is_installed(name):
            raise UsageError(missing(name))
    return chosen


def _is_installed(name: str) -> bool:
    return name not in PACKAGES or importlib.util.find_spec(PACKAGES[name]) is not None


def of_runtimes(scheme: str, runtimes: Sequence[str]) -> list[tuple[str, str]]:
    """The scheme's peers of these programs; without an arm whose own package is missing."""
    return [
        (name, form)
        for name, form in PEERS[scheme]
        if name.split(",")[0] in runtimes and (name in runtimes or _is_installed(name))
    ]


def command(threads: int) -> Callable[[int], Sequence[str]]:
    """The commands that start workers, by the arm's number: 0 is ours."""
    environment = ("env", f"OMP_NUM_THREADS={threads}")
    return lambda number: (*environment, *(WORKER if number else process.COMMAND))


def make_arms(
    ours: RunConfig,
    peers: Sequence[tuple[str, str]],
    folder: Path,
    threads: int,
    programs: Mapping[str, str] | None = None,
) -> list[ArmResult]:
    """Ours first, then each peer. Writes the file that ours reads into the folder, too; the others'
    are written as they load."""
    scheme = ours.quantization
    if scheme in SAME_FILE:
        path = _file(ours, peers[0][1], folder)
        _write(path, peers[0][1], ours)
        ours = replace(ours, quantization="as-is", checkpoint_path=str(path), num_layers=None)
    arms = [ArmResult(scheme, "", argv(ours, said=True))]
    for runtime, form in peers:
        is_written = bool(form) and scheme in WRITTEN
        file = str(_file(ours, form, folder)) if is_written else ours.checkpoint_path
        work = PeerWork(
            runtime=runtime,
            prompt=ours.prefill_size or 1,
            new=ours.max_new_tokens,
            threads=threads,
            seed=ours.seed,
            checkpoint=ours.checkpoint_path,
            num_layers=ours.num_layers,
            file=file if runtime in FILE_READERS else "",
            form=form if is_written else "",
            program=(programs or {}).get(runtime, ""),
            device=ours.device,
            rows=ours.batch_size,
        )
        arms.append(ArmResult(name_of(runtime, form), "", [json.dumps(to_json(work))]))
    return arms


def seconds_before(
    scheme: str, peers: Sequence[tuple[str, str]], ours: RunConfig, folder: Path, weights: int
) -> float:
    """About how long writing the files that are missing and loading every program takes."""
    forms = {form for _, form in peers if form and not _file(ours, form, folder).exists()}
    return weights / 1e9 * (sum(map(WRITING.__getitem__, forms)) + LOADING * (1 + len(peers)))


def name_of(runtime: str, form: str) -> str:
    """The arm's name."""
    return f"{runtime} {form}".strip()


def _file(ours: RunConfig, form: str, folder: Path) -> Path:
    """Where the GGUF of the model in that format is, or will be."""
    layers = f"-{ours.num_layers}" if ours.num_layers else ""
    name = re.sub(r"[^\w.-]", "_", ours.checkpoint_path)
    return folder / f"{name}{layers}-{form}.gguf"


def _write(path: Path, form: str, ours: RunConfig) -> None:
    if not path.exists():
        say(f"Writing {path.name} …")
        model = {"checkpoint": ours.checkpoint_path, "num_layers": ours.num_layers}
        with closing(Process(WORKER)) as worker:
            worker.ask("write_file", path=str(path), form=form, **model)
