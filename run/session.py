"""A loaded model, ready to speak: sampling, prefill, decode, and the functions compiled for them.

    session = Session(model, Sampling(0.8, 200), batch_size=1, cache_size=256, compile_decode=True)
    generation = session.generate(prompt, max_new_tokens=200)

Decode is one static-shape step: token and position in, next token and position out, all on the
device. Nothing in the loop waits for the device, so the CPU can run ahead of it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import devices
from kv_cache.base import CacheFactory
from kv_cache.dense import DenseKVCache
from models.llama import Transformer
from run import compiling

# Positions of a prompt at once: enough to keep the cores busy, whose activations are small beside
# a model's weights. The first is the CPU's: a 1 B Llama takes some 40 MB for them.
CHUNK = {"cpu": 512, "cuda": 2048, "xpu": 2048, "mps": 1024}


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy; otherwise draw from the `top_k` most likely tokens."""

    temperature: float
    top_k: int


@dataclass(frozen=True)
class Generation:
    """New tokens (B, N), and the seconds that the prompt and the N - 1 later tokens took."""

    tokens: Tensor
    prefill_seconds: float
    decode_seconds: float


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """The next token of every row, (B, 1), from logits (B, V).

    Dividing probabilities by exponential noise and taking the largest draws from them exactly
    (the exponential form of the Gumbel-max trick), without torch.multinomial's device sync.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    top, tokens = logits.float().topk(min(sampling.top_k, logits.shape[-1]))
    probabilities = torch.softmax(top / sampling.temperature, -1)
    noise = torch.empty_like(probabilities).exponential_(1)
    return tokens.gather(-1, (probabilities / noise).argmax(-1, keepdim=True))


# On the CPU, drawing is one op to the compiler, and run as it is when nothing is compiled: it takes
# microseconds, and the C++ that it would be made into seconds to compile.
torch.library.define(
    "quantbench::draw",
    "(Tensor logits, Tensor position, float temperature, int top_k) -> (Tensor, Tensor)",
)


@torch.library.impl("quantbench::draw", "CPU")
def _(logits, position, temperature, top_k):
    return sample(logits, Sampling(temperature, top_k)), position + 1


@torch.library.register_fake("quantbench::draw")
def _(logits, position, temperature, top_k):
    return position.new_empty((len(logits), 1)), torch.empty_like(position)


class Session:
    """One model with its caches and compiled functions; they live and die with it."""

    def __init__(
        self,
        model: Transformer,
        sampling: Sampling,
        batch_size: int,
        cache_size: int,
        compile_decode: bool = False,
        compile_prefill: bool = False,
        cache: CacheFactory = DenseKVCache,
        prefill_chunk: int | None = None,
    ) -> None:
        """`prefill_chunk`: how many positions of a prompt go through the model at once."""
        self.model, self.sampling = model, sampling
        self.device = model.tok_embeddings.weight.device
        self.prefill_chunk = prefill_chunk or CHUNK.get(self.device.type, CHUNK["cpu"])
        model.setup_caches(batch_size, cache_size, cache)
        options = compiling.options(self.device) if compile_decode or compile_prefill else {}
        self.step = self._next_token
        self.prefill = self._next_token
        self.fill = model.hidden
        if compile_decode:
            nested = not model.decodes_in_cpp and all(map(_is_plain, model.parameters()))
            model.nested_regions = nested
            self.step = torch.compile(self._next_token, fullgraph=True, options=options)
        if compile_prefill:
            # Prompts differ in length, and a CUDA graph or a frozen kernel serves only one.
            more = {"fullgraph": True, "options": options if self.device.type == "cpu" else {}}
            self.prefill = _for_any_length(torch.compile(self._next_token, **more))
            self.fill = _for_any_length(torch.compile(model.hidden, **more))

    def _next_token(
        self, tokens: Tensor, input_pos: Tensor, start: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run tokens (B, S) at positions (S,); the next token (B, 1) and its position (1,)."""
        logits = self.model(tokens, input_pos, last_only=True, start=start)
        logits, position, how = logits[:, -1], input_pos[-1:], self.sampling
        if self.device.type == "cpu":
            return torch.ops.quantbench.draw(logits, position, how.temperature, how.top_k)
        return sample(logits, how), position + 1

    @torch.no_grad()
    def stream(self, prompt: Tensor, start: int = 0) -> Iterator[Tensor]:
        """Prompt (B, S) at positions start, start + 1, …; then next tokens (B, 1) without end.

        The caller stops before the cache is full. Each token is a copy of its own: a CUDA graph
        writes every step's result over the last one's.
        """
        *chunks, last = prompt.split(self.prefill_chunk, dim=1)
        for chunk in chunks:
            self.fill(chunk, self._positions(chunk, start), start=start)
            start += chunk.shape[1]
        token, position = self.prefill(last, self._positions(last, start), start=start)
        yield token.clone()
        while True:
            with _decode_attention(self.device):
                token, position = self.step(token.clone(), position.clone())
            yield token.clone()

    def _positions(self, tokens: Tensor, start: int) -> Tensor:
        return torch.arange(start, start + tokens.shape[1], device=self.device)

    @torch.no_grad()
    def fill_randomly(self, depth: int) -> None:
        """Put random keys and values at positions 0 to depth - 1 of every layer."""
        for cache in self.model.caches:
            cache.fill(depth)

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        start: int = 0,
        after_token: Callable[[], object] = lambda: None,
    ) -> Generation:
        """Continue prompt (B, S), which lies on the device, by exactly max_new_tokens tokens.

        `after_token` is called once the prompt is done, and then as each decoding step has been
        issued, which on an accelerator is before it is over.
        """
        devices.synchronize(self.device)
        started = time.perf_counter()
        stream = self.stream(prompt, start)
        tokens = [next(stream)]
        devices.synchronize(self.device)
        prefilled = time.perf_counter()
        after_token()
        for _ in range(max_new_tokens - 1):
            tokens.append(next(stream))
            after_token()
        devices.synchronize(self.device)
        ended = time.perf_counter()
        return Generation(torch.cat(tokens, 1), prefilled - started, ended - prefilled)


def _for_any_length(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def run(tokens: Tensor, input_pos: Tensor, start: int) -> Any:
        torch._dynamo.maybe_mark_dynamic(tokens, 1)
        torch._dynamo.maybe_mark_dynamic(input_pos, 0)
        return compiled(tokens, input_pos, start=start)

    return run


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether a nested compile region takes this weight: it does not take tensor subclasses."""
    return type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor


def _decode_attention(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On CUDA, let inductor fuse one query's attention: the flash kernels are for many."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
