"""The arms of `quantbench peers`: one of our schemes, and the peers that it is compared with.

arms = make_arms(config, of_runtimes("int8wo", ["llama.cpp"]), folder, threads=2)
measure(arms, settings, command(threads=2))
"""

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from quantbench.bench import process
from quantbench.bench.process import Process
from quantbench.bench.store import ArmResult
from quantbench.errors import UsageError
from quantbench.log.config import RunConfig, argv
from quantbench.progress import say
from quantbench.typed_json import to_json

WORKER = (sys.executable, "-m", "quantbench.peers.worker")
# Schemes of which llama.cpp gets a file of the same weights, and those that read its very file.
WRITTEN = ("none", "int8wo", "fp6", "int4wo-128")
SAME_FILE = ("gguf-Q4_0", "gguf-Q8_0", "gguf-Q4_K_M", "gguf-Q6_K")
# For each scheme the peers that it is compared with, as (runtime, format).
PEERS: dict[str, Sequence[tuple[str, str]]] = {
    "none": (
        ("llama.cpp", "BF16"),
        ("transformers", "BF16"),
        ("transformers, compiled", "BF16"),
    ),
    "int8wo": (("llama.cpp", "Q8_0"),),
    "fp6": (("llama.cpp", "Q6_K"),),
    "int4wo-128": (("llama.cpp", "Q4_0"),),
    **{name: [("llama.cpp", name.removeprefix("gguf-"))] for name in SAME_FILE},
    "as-is": (("llama.cpp", ""),),  # of a checkpoint that is a GGUF file
}
RUNTIMES = ("llama.cpp", "transformers")
ON_A_CARD = ("transformers",)  # llama.cpp's wheel on PyPI is built for the CPU
PACKAGES = {"llama.cpp": "llama_cpp", "transformers": "transformers"}
MISSING = "quantbench peers needs more packages: pip install '.[peers]'"


@dataclass(frozen=True)
class Work:
    """Read `prompt` tokens at once, then make `new` tokens one by one: what every runtime does."""

    runtime: str  # a key of peers.worker.RUNTIMES
    prompt: int
    new: int
    threads: int
    checkpoint: str  # as in generate.py
    seed: int = 1234
    num_layers: int | None = None  # as in generate.py
    file: str = ""  # the GGUF of the checkpoint, for llama.cpp
    device: str = "cpu"


def check_packages(runtimes: Sequence[str]) -> None:
    """UsageError unless all that these runtimes need is installed."""
    for package in map(PACKAGES.__getitem__, runtimes):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"{MISSING} ({package} is missing)")


def of_runtimes(scheme: str, runtimes: Sequence[str]) -> list[tuple[str, str]]:
    """The scheme's peers that are of these programs."""
    return [(name, form) for name, form in PEERS[scheme] if name.split(",")[0] in runtimes]


def command(threads: int) -> Callable[[int], Sequence[str]]:
    """The commands that start workers, by the arm's number: 0 is ours."""
    environment = ("env", f"OMP_NUM_THREADS={threads}")
    return lambda number: (*environment, *(WORKER if number else process.COMMAND))


def make_arms(
    ours: RunConfig, peers: Sequence[tuple[str, str]], folder: Path, threads: int
) -> list[ArmResult]:
    """Ours first, then each runtime. Writes the files that llama.cpp reads into the folder."""
    name = ours.quantization
    if name in SAME_FILE:
        path = str(_file(ours, peers[0][1], folder))
        ours = replace(ours, quantization="as-is", checkpoint_path=path, num_layers=None)
    arms = [ArmResult(name, "", argv(ours, said=True))]
    for runtime, form in peers:
        is_file = runtime == "llama.cpp"
        read = ours.checkpoint_path if ours.quantization == "as-is" else _file(ours, form, folder)
        work = Work(
            runtime=runtime,
            prompt=ours.prefill_size or 1,
            new=ours.max_new_tokens,
            threads=threads,
            seed=ours.seed,
            checkpoint=ours.checkpoint_path,
            num_layers=ours.num_layers,
            file=str(read) if is_file else "",
            device=ours.device,
        )
        name = f"{runtime} {form}".strip() if is_file else runtime
        arms.append(ArmResult(name, "", [json.dumps(to_json(work))]))
    return arms


def _file(ours: RunConfig, form: str, folder: Path) -> Path:
    """The GGUF of the model in that format, written where it is missing."""
    layers = f"-{ours.num_layers}" if ours.num_layers else ""
    name = re.sub(r"[^\w.-]", "_", ours.checkpoint_path)
    path = folder / f"{name}{layers}-{form}.gguf"
    if path.exists():
        return path
    say(f"Writing {path.name} …")
    model = {"checkpoint": ours.checkpoint_path, "num_layers": ours.num_layers}
    with closing(Process(WORKER)) as worker:
        worker.ask("write_file", path=str(path), form=form, **model)
    return path
