"""The work of every runtime of `quantbench peers`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Read `prompt` tokens at once, then make `new` tokens one by one."""

    runtime: str  # a key of peers.worker.RUNTIMES
    prompt: int
    new: int
    threads: int
    checkpoint: str  # as in generate.py
    seed: int = 1234
    num_layers: int | None = None  # as in generate.py
    file: str = ""  # the GGUF of the checkpoint, for llama.cpp
