"""Another project's runtime in a process of its own, as bench/worker.py is for ours.

    python -m quantbench.peers.worker       # one JSON object a line in, one a line out

    {"do": "load", "argv": ["{\"runtime\": \"llama.cpp\", \"file\": \"model.gguf\", …}"]}
    {"do": "get_ready"}
    {"do": "sample", "index": 3}
    {"do": "turn", "kind": "decode", "tokens": 8}

Each runtime has its own process because libraries compete for threads; while others are
measured it waits for its input and takes no processor time. Every runtime reads a prompt and then
takes the likeliest token, again and again; we time the same work that generate.py does.
"""

from __future__ import annotations

import functools
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from quantbench import devices, files
from quantbench.bench.answers import ArmFacts, TimedSample, TurnTime
from quantbench.bench.worker import serve
from quantbench.cli import quiet
from quantbench.errors import MemoryShortage, QuantbenchError, UsageError
from quantbench.models.config import ModelConfig
from quantbench.models.formats.gguf_writer import as_hugging_face
from quantbench.models.loading import load_config, load_model
from quantbench.ops.cpu import build
from quantbench.peers import gguf_file
from quantbench.peers.arms import MISSING, Work
from quantbench.run import compiling
from quantbench.run.environment import without_collections
from quantbench.run.facts import Ready, Sample
from quantbench.run.measure import warm_up
from quantbench.typed_json import from_json

CPU = torch.device("cpu")


class LlamaCpp:
    """llama.cpp through its own C interface, as llama-cpp-python has it.

    It can repack weights for its kernels ("extra buffers"), which is faster for most formats and
    slower for some (docs/LOG.md): both are timed, and the faster one is used.
    """

    TRIED_STEPS = 5
    model: Any = None
    context: Any = None

    def __init__(self, work: Work, headroom: int) -> None:
        import llama_cpp

        _check_memory(Path(work.file).stat().st_size, headroom)
        self.api, self.work = llama_cpp, work
        self.weight_bytes = gguf_file.weight_bytes(Path(work.file))
        llama_cpp.llama_backend_init()
        taken = {extra: self._tried(extra) for extra in (True, False)}
        extra = taken[True] <= taken[False]
        if extra:
            self._open(extra)  # without them is what is loaded
        system = " ".join(llama_cpp.llama_print_system_info().decode().split())
        self.about = f"extra buffers {'on' if extra else 'off'}, the faster here; {system}"

    def _tried(self, extra: bool) -> float:
        """Seconds of a decoding step, the median of a few."""
        self._open(extra)
        self.begin()
        token, ticks = self.next(list(range(min(self.work.prompt, self.vocab)))), []
        for _ in range(min(self.TRIED_STEPS, self.work.new - 1)):
            ticks.append(time.perf_counter())
            token = self.next([token])
        ticks.append(time.perf_counter())
        return statistics.median(b - a for a, b in zip(ticks, ticks[1:], strict=False))

    def _open(self, extra: bool) -> None:
        api, work = self.api, self.work
        if self.context:
            api.llama_free(self.context)
            api.llama_model_free(self.model)
        params = api.llama_model_default_params()
        params.use_extra_bufts = extra
        if hasattr(params, "load_mode"):  # allocate memory instead of mapping the file
            params.load_mode = api.LLAMA_LOAD_MODE_NONE
        else:
            params.use_mmap = False
        self.model = api.llama_model_load_from_file(work.file.encode(), params)
        if not self.model:
            raise QuantbenchError(f"llama.cpp does not read {work.file}")
        settings = api.llama_context_default_params()
        settings.n_ctx = work.prompt + work.new
        settings.n_batch = max(512, work.prompt)
        settings.n_threads = settings.n_threads_batch = work.threads
        settings.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = api.llama_init_from_model(self.model, settings)
        if not self.context:
            raise QuantbenchError(f"llama.cpp has no context for {work.file}")
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def begin(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def next(self, tokens: list[int]) -> int:
        """Append these tokens to those before; the likeliest token to follow."""
        array = (self.api.llama_token * len(tokens))(*tokens)
        batch = self.api.llama_batch_get_one(array, len(tokens))
        if failed := self.api.llama_decode(self.context, batch):
            raise QuantbenchError(f"llama_decode says {failed}")
        logits = self.api.llama_get_logits_ith(self.context, -1)
        self.logits = numpy.ctypeslib.as_array(logits, shape=(self.vocab,))
        return int(self.logits.argmax())


class HuggingFace:
    """Hugging Face transformers in bfloat16, its decoding step compiled or not."""

    def __init__(self, work: Work, headroom: int, compiled: bool = False) -> None:
        import transformers

        architecture = _architecture(work.checkpoint, work.num_layers)
        parts = {"experts": "mixture", "qk_norm": "qk_norm", "norms of outputs": "post_norms"}
        for part, field in parts.items():
            if getattr(architecture, field):
                raise QuantbenchError(
                    f"{architecture.name} has {part}; compare it with --runtimes llama.cpp"
                )
        if beyond := architecture.beyond_llama():
            raise QuantbenchError(
                f"{architecture.name} has {beyond}, which LlamaForCausalLM has not"
            )
        self.device = torch.device(work.device)
        _check_memory(2 * architecture.parameters(), headroom, self.device)
        torch.set_num_threads(work.threads)
        self.compiled, self.length = compiled, work.prompt + work.new
        self.model = hugging_face(work.checkpoint, work.num_layers).to(self.device)
        self.vocab = self.model.config.vocab_size
        unread = 0 if self.model.config.tie_word_embeddings else 1
        table = self.model.model.embed_tokens.weight
        numbers = sum(p.numel() for p in self.model.parameters()) - unread * table.numel()
        self.weight_bytes = numbers * table.itemsize
        self.step: Callable[..., Any] = self.model
        if compiled:
            on_cpu = self.device.type == "cpu"
            options = build.options_of_inductor() if on_cpu else compiling.options(self.device)
            self.step = torch.compile(self.model, fullgraph=True, dynamic=False, options=options)
        self.about = f"transformers {transformers.__version__}, torch {torch.__version__}"

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
                torch.tensor([tokens], device=self.device),
                position_ids=positions[None],
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        self.logits = output.logits[0, -1]
        return int(self.logits.argmax())


RUNTIMES: dict[str, Callable[[Work, int], Any]] = {
    "llama.cpp": LlamaCpp,
    "transformers": HuggingFace,
    "transformers, compiled": functools.partial(HuggingFace, compiled=True),
}


def hugging_face(checkpoint: str, num_layers: int | None) -> Any:
    """LlamaForCausalLM with the checkpoint's weights, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = _architecture(checkpoint, num_layers)
    scaling: dict[str, Any] = {}
    if ours.rope_scaling:
        kept = ("factor", "low_freq_factor", "high_freq_factor")
        parts = {name: getattr(ours.rope_scaling, name) for name in kept}
        parts["original_max_position_embeddings"] = ours.rope_scaling.original_max_position
        parts["rope_type"] = "llama3"
        scaling = {"rope_scaling": parts}
    made: Any = LlamaConfig  # transformers 4 and 5 name their arguments differently
    config = made(
        hidden_size=ours.dim,
        intermediate_size=ours.ffn_dim,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        vocab_size=ours.vocab_size,
        max_position_embeddings=ours.max_position,
        rms_norm_eps=ours.norm_eps,
        rope_theta=ours.rope_theta,
        tie_word_embeddings=ours.tie_embeddings,
        **scaling,
    )
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


def _architecture(checkpoint: str, num_layers: int | None) -> ModelConfig:
    config = load_config(checkpoint)
    return config.with_layers(num_layers) if num_layers else config


class PeerWorker:
    """Answers a comparison as bench/worker.py's Worker does."""

    def write_file(self, path: str, checkpoint: str, form: str, num_layers: int | None) -> None:
        """The checkpoint as a GGUF, whole or not at all."""
        files.replace(
            "--gguf", path, lambda part: gguf_file.write(part, checkpoint, form, num_layers)
        )

    def load(
        self, argv: list[str], saved: str | None = None, headroom: int = 0, others: int = 0
    ) -> None:
        """Load the model, if `headroom` bytes stay free. argv: a Work as JSON, alone. saved: not
        used. others: bytes that unloading the other arms would free."""
        quiet(False)
        self.work = work = from_json(Work, json.loads(argv[0]))
        try:
            self.runtime = RUNTIMES[work.runtime](work, headroom)
        except ImportError:
            raise UsageError(MISSING) from None
        drawn = random.Random(work.seed)
        self.prompt = [drawn.randrange(self.runtime.vocab) for _ in range(work.prompt)]

    def get_ready(self) -> ArmFacts:
        """Compile and warm up."""
        seconds, steady = warm_up(self._sample_seconds)
        return ArmFacts(
            device=self.work.device,
            weight_bytes=self.runtime.weight_bytes,
            ready=Ready(None, seconds, steady),
            peak_memory_bytes={"warm_up": devices.peak_memory(torch.device(self.work.device))},
            about=self.runtime.about,
        )

    def sample(self, index: int) -> TimedSample:
        """Every sample does the same work, whatever its index."""
        prompt, new = self.work.prompt, self.work.new
        prefill, steps = self._prompt(), [self._decode(1) for _ in range(new - 1)]
        sample = Sample.of(prefill, math.fsum(steps), prompt, new)
        return TimedSample(**vars(sample), token_seconds=steps[1:])

    def _sample_seconds(self, index: int) -> float:
        sample = self.sample(index)
        return sample.prefill_seconds + sample.decode_seconds

    def turn(self, kind: str, tokens: int) -> TurnTime:
        """kind: prompt, or decode of so many tokens, after one that does not count. Decoding goes
        on where it stopped; at the end of `work.new` tokens it begins again behind the prompt."""
        if kind == "prompt":
            return TurnTime(self.work.prompt, self._prompt())
        if self.left <= tokens:
            self._prompt()
        self._decode(1)
        return TurnTime(tokens, self._decode(tokens))

    def _prompt(self) -> float:
        """Seconds to read the prompt."""
        self.runtime.begin()
        self.left = self.work.new  # tokens that the runtime has room for
        return self._seconds(self.prompt, 1)

    def _decode(self, steps: int) -> float:
        """Seconds of `steps` steps."""
        self.left -= steps
        return self._seconds([self.token], steps)

    def _seconds(self, tokens: list[int], steps: int) -> float:
        """Of appending these tokens, and after the first step the likeliest one each."""
        with without_collections():
            started = time.perf_counter()
            for _ in range(steps):
                self.token = self.runtime.next(tokens)
                tokens = [self.token]
            return time.perf_counter() - started


def _check_memory(needed: int, headroom: int, device: torch.device = CPU) -> None:
    """Raise MemoryShortage unless this many bytes, and `headroom` more, are free."""
    free = devices.free_memory(device)
    if free is not None and needed > free - headroom:
        raise MemoryShortage(
            f"out of memory: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free"
        )


if __name__ == "__main__":
    serve(PeerWorker())
