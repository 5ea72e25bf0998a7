"""Other programs that make tokens, each as a class; peers/worker.py asks them.

    runtime = RUNTIMES["transformers"](work, headroom=0)
    runtime.tokens = [17, 4, …]     # the prompt
    runtime.prompt()                # seconds to read it and to choose the token after it
    runtime.decode(8)               # seconds of each of the 8 tokens behind that

Every program chooses the likeliest token each time. PeerWorker asks a Stepwise program for each
step, which this module times. A server runs its own loop, from the prompt to the last token, and
reports the seconds of each part.
"""

from __future__ import annotations

import functools
import json
import socket
import subprocess
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantbench import devices
from quantbench.errors import MemoryShortage, QuantbenchError
from quantbench.models.config import ModelConfig
from quantbench.models.formats.gguf_writer import as_hugging_face
from quantbench.models.hugging_face import OF_KEYS
from quantbench.models.loading import load_config, load_model
from quantbench.models.shapes import beyond_llama
from quantbench.ops.cpu import compiling
from quantbench.peers import gguf_file
from quantbench.peers.arms import PeerWork
from quantbench.run.decoding import compile_options

CPU = torch.device("cpu")
ROUNDED = "activations rounded to 8 bits where weights are quantized, cache in float16"


class Runtime(ABC):
    """Every row of a batch has the same tokens. vocab: ids that a prompt may have; weight_bytes:
    that a step reads; about: the version, and how it rounds activations and keeps the cache."""

    vocab: int
    weight_bytes: int
    about: str
    tokens: list[int]

    @abstractmethod
    def prompt(self) -> float: ...

    @abstractmethod
    def decode(self, steps: int) -> list[float]:
        """Behind the tokens so far; behind the prompt where a program keeps nothing, or has no room
        left."""


class Stepwise(Runtime):
    left = 0  # tokens that there is room for
    work: PeerWork

    @abstractmethod
    def begin(self) -> None:
        """Forget all tokens."""

    @abstractmethod
    def next(self, tokens: list[int]) -> int:
        """Append these tokens to those before; the likeliest token to follow."""

    def prompt(self) -> float:
        self.begin()
        self.left = self.work.new
        return self._timed(self.tokens)

    def decode(self, steps: int) -> list[float]:
        if self.left < steps:
            self.prompt()
        self.left -= steps
        return [self._timed([self.token]) for _ in range(steps)]

    def _timed(self, tokens: list[int]) -> float:
        started = time.perf_counter()
        self.token = self.next(tokens)
        return time.perf_counter() - started


class TransformersRuntime(Stepwise):
    """Hugging Face transformers in bfloat16, its decoding step compiled or not; unpacked: from a
    GGUF file, whose weights it turns into bfloat16, as it does on every processor."""

    def __init__(
        self, work: PeerWork, headroom: int, compiled: bool = False, unpacked: bool = False
    ) -> None:
        import transformers

        self.work, self.compiled, self.length = work, compiled, work.prompt + work.new
        architecture = load_config(work.file or work.checkpoint, work.num_layers)
        self.device = torch.device(work.device)
        _check_memory(2 * architecture.parameters(), headroom, self.device)
        torch.set_num_threads(work.threads)
        if unpacked:
            file = Path(work.file)
            any_model: Any = transformers.AutoModelForCausalLM
            self.model: Any = any_model.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.bfloat16
            ).eval()
        else:
            _check_llama(architecture)
            self.model = hugging_face(work.checkpoint, work.num_layers).to(self.device)
        self.vocab = self.model.config.vocab_size
        unread = 0 if self.model.config.tie_word_embeddings else 1
        table = self.model.model.embed_tokens.weight
        numbers = sum(p.numel() for p in self.model.parameters()) - unread * table.numel()
        self.weight_bytes = numbers * table.itemsize
        self.step: Callable[..., Any] = self.model
        if compiled:
            on_cpu = self.device.type == "cpu"
            options = compiling.options_of_inductor() if on_cpu else compile_options(self.device)
            self.step = torch.compile(self.model, fullgraph=True, dynamic=False, options=options)
        self.about = (
            f"transformers {transformers.__version__}, torch {torch.__version__}; weights, "
            "activations and cache in bfloat16"
        )

    def begin(self) -> None:
        from transformers import DynamicCache, StaticCache

        self.position = 0
        if not self.compiled:
            self.cache: Any = DynamicCache(config=self.model.config)
        elif hasattr(self, "cache"):
            self.cache.reset()  # the compiled step refers to this cache
        else:
            self.cache = StaticCache(config=self.model.config, max_cache_len=self.length)

    def next(self, tokens: list[int]) -> int:
        count = len(tokens)
        positions = torch.arange(self.position, self.position + count, device=self.device)
        self.position += count
        with torch.no_grad():
            run = self.step if count == 1 else self.model
            output = run(
                torch.tensor(self.work.rows * [tokens], device=self.device),
                position_ids=positions[None],
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        self.logits = output.logits[0, -1]
        return int(self.logits.argmax())


class LlamaServer(Runtime):
    """llama-server of llama.cpp or of ik_llama.cpp, a program of the user's.

    The prompt's keys and values stay in the server, so that a decoding turn computes its last token
    alone anew. Each row of a batch is a request of its own. Where the server has dropped a
    row's prompt, rows that are decoding wait for it: so the row that starts last is timed.
    """

    TOGETHER = 8  # steps of a batch at least: the last ones have fewer rows

    def __init__(self, work: PeerWork, headroom: int) -> None:
        _check_memory(Path(work.file).stat().st_size, headroom)
        self.work = work
        self.weight_bytes = gguf_file.weight_bytes(Path(work.file))
        self.vocab = gguf_file.vocabulary(Path(work.file))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = {"m": work.file, "t": work.threads, "tb": work.threads, "np": work.rows,
                   "c": work.rows * (work.prompt + work.new + 8),
                   "b": max(512, work.rows * work.prompt),
                   "-host": "127.0.0.1", "-port": port}  # fmt: skip
        given = [word for name, value in options.items() for word in (f"-{name}", str(value))]
        # llama.cpp always repacks weights for its kernels, ik_llama.cpp with this option.
        given += ["-rtr"] if work.runtime == "ik_llama.cpp" else []
        # Without --log-disable it writes llama.log into the current folder.
        command = [work.program, *given, "--no-mmap", "--log-disable"]
        self.server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while not self._answers():
            if (code := self.server.poll()) is not None:
                raise QuantbenchError(f"{work.program} ended with exit code {code} for {work.file}")
            time.sleep(0.1)
        self.about = f"{ROUNDED}; weights repacked"

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:  # not yet
            return False

    def prompt(self) -> float:
        return self.generate(1)[0]

    def generate(self, new: int) -> list[float]:
        """Seconds of each of `new` tokens behind the prompt, of the first with the prompt's."""
        rows = range(self.work.rows)
        with ThreadPoolExecutor(len(rows)) as pool:
            started = time.perf_counter()
            rest = min(pool.map(lambda row: self._seconds_after_the_prompt(row, new), rows))
            prompt = time.perf_counter() - started - rest
        steps = new - 1  # the first token is chosen when the prompt's time ends
        return [prompt, *steps * [rest / max(1, steps)]]

    def decode(self, steps: int) -> list[float]:
        least = min(self.TOGETHER, self.work.new - 1) if self.work.rows > 1 else 1
        return self.generate(max(steps, least) + 1)[1 : steps + 1]

    def _seconds_after_the_prompt(self, row: int, new: int) -> float:
        asked = {"prompt": self.tokens, "n_predict": new, "temperature": 0, "top_k": 1,
                 "ignore_eos": True, "cache_prompt": new > 1, "id_slot": row}  # fmt: skip
        body = json.dumps(asked).encode()
        request = urllib.request.Request(
            f"{self.url}/completion", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            took: dict[str, float] = json.load(answer)["timings"]
        if took["predicted_n"] != new:
            raise QuantbenchError(f"the server made {took['predicted_n']} tokens of {new}")
        if new == 1 and took["prompt_n"] != len(self.tokens):
            raise QuantbenchError(
                f"the server had kept the prompt: it read {took['prompt_n']} of it"
            )
        return took["predicted_ms"] / 1e3


RUNTIMES: dict[str, Callable[[PeerWork, int], Any]] = {
    "llama.cpp": LlamaServer,
    "transformers": TransformersRuntime,
    "transformers, compiled": functools.partial(TransformersRuntime, compiled=True),
    "transformers, unpacked": functools.partial(TransformersRuntime, unpacked=True),
    "ik_llama.cpp": LlamaServer,
}


def hugging_face(checkpoint: str, num_layers: int | None) -> Any:
    """LlamaForCausalLM with the checkpoint's weights, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = load_config(checkpoint, num_layers)
    scaling: dict[str, Any] = {}
    if ours.rope_scaling:
        kept = ("factor", "low_freq_factor", "high_freq_factor")
        parts = {name: getattr(ours.rope_scaling, name) for name in kept}
        parts["original_max_position_embeddings"] = ours.rope_scaling.original_max_position
        parts["rope_type"] = "llama3"
        scaling = {"rope_scaling": parts}
    made: Any = LlamaConfig  # transformers 4 and 5 name their arguments differently
    given = {key: getattr(ours, name) for key, name in OF_KEYS.items()}
    config = made(**given, rope_theta=ours.rope_theta, **scaling)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).bfloat16()
    model.eval()
    weights: dict[str, Any] = {}

    def keep(name: str, module: nn.Module) -> nn.Module:
        weights.update(as_hugging_face(name, module.weight, ours))
        return nn.Identity()

    load_model(checkpoint, "cpu", torch.bfloat16, num_layers, keep)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its table is not loaded
    return model.requires_grad_(False)


def _check_llama(architecture: ModelConfig) -> None:
    """QuantbenchError unless LlamaForCausalLM is this model."""
    parts = {"experts": "mixture", "qk_norm": "qk_norm", "norms of outputs": "post_norms"}
    for part, field in parts.items():
        if getattr(architecture, field):
            raise QuantbenchError(
                f"{architecture.name} has {part}; compare it with --runtimes llama.cpp"
            )
    if beyond := beyond_llama(architecture):
        raise QuantbenchError(f"{architecture.name} has {beyond}, which LlamaForCausalLM has not")


def _check_memory(needed: int, headroom: int, device: torch.device = CPU) -> None:
    """Raise MemoryShortage unless this many bytes, and `headroom` more, are free."""
    free = devices.free_memory(device)
    if free is not None and needed > free - headroom:
        raise MemoryShortage(
            f"out of memory: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free"
        )
