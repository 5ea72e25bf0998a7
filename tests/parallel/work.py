"""What ranks do in the tests: functions of (ranks, …), which processes receive by name."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quantbench.generate import Generator, Sampling
from quantbench.log.config import RunConfig
from quantbench.models.formats import open_checkpoint
from quantbench.ops.cpu import ranks as shared_memory
from quantbench.ops.cpu.ranks import CAPACITY
from quantbench.ops.ranks import Ranks
from quantbench.parallel.split_loading import split_for
from quantbench.quantize.activation import RoundedAcross
from quantbench.run.decoding import choose
from quantbench.run.loading import Loading
from quantbench.run.plan import scheme_of
from tests.models.small import SMALL
from tests.ops.small_step import fail_allocation

TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]
# Sums of some hundred products in another order: float32's rounding, amplified by a few layers.
TOLERANCE = 1e-5
# Wide enough for groups of 256 columns on two ranks. The network has three such groups: one rank
# gets two of them.
WIDE = SMALL | {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 128}
WIDE |= {"intermediate_size": 768, "vocab_size": 101, "attention_bias": True}


def agree(shared: Tensor, alone: Tensor) -> None:
    assert (shared - alone).abs().max() <= TOLERANCE * alone.abs().max()


def load(ranks: Ranks, checkpoint_path: str, quantization: str = "none", **options: Any):
    """A `Loading` that has loaded, and its model."""
    given = {"quantization": quantization} if quantization != "none" else {}
    config = RunConfig(
        checkpoint_path=checkpoint_path, device="cpu", **{"precision": "float32"} | given | options
    )
    checkpoint = open_checkpoint(checkpoint_path)
    spec, checkpoint = scheme_of(config, checkpoint)
    split = None
    if ranks.size > 1:
        layers = checkpoint.saved and checkpoint.saved.layers
        split = split_for(checkpoint.config(), ranks, spec.scheme, layers)
    loading = Loading(config, spec, torch.device("cpu"), checkpoint, split)
    return loading, loading.load(lambda done, total: None, lambda line: None)


def logits(ranks: Ranks, path: str, tokens: list[list[int]], *how: Any, **options: Any) -> Tensor:
    """Logits (B, S, V) of a prompt."""
    _, model = load(ranks, path, *how, **options)
    with torch.no_grad():
        return model(torch.tensor(tokens)).clone()


def numbers(ranks: Ranks, path: str, quantization: str, **options: Any) -> dict[str, Tensor]:
    """The numbers that each layer's weight represents, by layer."""
    kernel = "torch" if quantization == "none" else "reference"
    _, model = load(ranks, path, quantization, kernel=kernel, **options)
    return {
        name.removesuffix(".inner"): _numbers(module.weight.data)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), torch.Tensor)
    }


def _numbers(weight: Tensor) -> Tensor:
    return weight.dequantize() if hasattr(weight, "dequantize") else weight.float()


def steps(
    ranks: Ranks, tokens: list[int], kv_cache: str, decoder: str, *model_and_scheme: str
) -> tuple[Tensor, Tensor]:
    """Logits of a prompt in chunks and of two steps after it, and drawn tokens."""
    _, model = load(ranks, *model_and_scheme)
    sampling = Sampling(temperature=0.8, top_k=50)
    generator = Generator(model, 1, 64, kv_cache, decoder, prefill_chunk=4, sampling=sampling)
    prompt = torch.tensor([tokens])
    pieces = [generator.forward(prompt, 0)]
    pieces += [generator.forward(prompt[:, :1], len(tokens) + i) for i in range(2)]
    torch.manual_seed(0)
    drawn = generator.generate(prompt, 6).tokens
    return torch.cat(pieces, 1), drawn


def sharing(ranks: Ranks, path: str) -> Ranks:
    """The same ranks, which share the memory of that file; each test has its own."""
    if ranks.size == 1:
        return ranks
    handle = shared_memory.open_memory(path, ranks.rank, ranks.size)
    assert handle
    ranks.total([1.0])  # all have opened it
    return shared_memory.SharedMemoryRanks(**vars(ranks) | {"memory": handle})


def decoded(
    ranks: Ranks,
    memory: str,
    tokens: list[list[int]],
    options: dict[str, Any],
    kv_cache: str = "dense",
    decoder: str = "auto",
    threads: int = 1,
    together: int = 1,
) -> tuple[Tensor, str]:
    """Logits (B, S, V) of tokens that are decoded so many at a time, and the decoder's name.

    options: arguments of `load`. memory: a file for the ranks to share."""
    _, model = load(sharing(ranks, memory), **options)
    generator = Generator(model, len(tokens), len(tokens[0]), kv_cache, decoder)
    chunks = torch.tensor(tokens).split(together, 1)
    assert all(generator.decoder.takes(chunk) for chunk in chunks)
    with of_threads(threads):
        logits = [generator.forward(chunk, at * together) for at, chunk in enumerate(chunks)]
    return torch.cat(logits, 1), generator.decoder.name


@contextmanager
def of_threads(count: int) -> Iterator[None]:
    """torch has `count` threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def failing_step(ranks: Ranks, memory: str, member: int) -> list[str]:
    """A rank's message when a thread of rank 1 cannot allocate memory, then and afterwards."""
    _, model = load(sharing(ranks, memory), "tiny")
    generator = Generator(model, 1, 4, decoder="cpu-step")
    token, messages = torch.tensor([[5]]), []
    with of_threads(2):
        generator.forward(token, 0)
        if ranks.rank == 1:
            fail_allocation(member, 2)
        for _ in range(2):
            try:
                generator.forward(token, 1)
            except RuntimeError as error:
                messages.append(str(error).splitlines()[0])
    return messages


def compiled_step(ranks: Ranks, memory: str, path: str) -> tuple[Tensor, Tensor]:
    """Logits of a step: by a graph that torch.compile traced without a break, and by modules.
    memory: a file for the ranks to share, or "" for torch's collectives.

    Inductor is left out: its C++ compiler takes most of a minute, and the collectives are traced
    before it."""
    _, model = load(sharing(ranks, memory) if memory else ranks, path)
    caches = Generator(model, 1, 64).caches
    plain, traced = (choose("modules", model, caches, 1, compiled) for compiled in (False, True))
    step = torch.compile(traced.step, fullgraph=True, backend="aot_eager")
    arguments = torch.tensor([[5]]), torch.tensor([0])
    with torch.no_grad():
        return step(*arguments), plain.step(*arguments)


def save(ranks: Ranks, path: str, quantization: str, folder: str) -> None:
    load(ranks, path, quantization, save=folder)


def rounded_product(
    ranks: Ranks, how: str, x: Tensor, weight: Tensor, bias: Tensor, widths: list[int]
) -> Tensor:
    """x times a weight of which each rank has some columns; the bias is rank 0's."""
    start = sum(widths[: ranks.rank])
    mine = slice(start, start + widths[ranks.rank])
    inner = torch.nn.Linear(widths[ranks.rank], len(weight), bias=False)
    inner.weight.data = weight[:, mine]
    layer = RoundedAcross(inner, None if ranks.rank else bias, how, ranks, widths)
    with torch.no_grad():
        return ranks.sum(layer(x[..., mine]))


def shared_sums(ranks: Ranks, path: str, lengths: list[int]) -> list[Tensor]:
    """Sums of whole numbers, drawn from each rank's own seed, through shared memory."""
    shares = sharing(ranks, path)
    return [shares.sum(numbers_of(ranks.rank, i, n)) for i, n in enumerate(lengths)]


def shared_gathers(ranks: Ranks, path: str, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of ranks side by side: of equal width, of different widths, and many."""
    shares = sharing(ranks, path)
    uneven = [3 + i for i in range(ranks.size)]
    many = [CAPACITY + 5 * i for i in range(ranks.size)]
    each = [(3, [4] * ranks.size, None), (2, uneven, uneven), (2, many, many)]
    gathered = []
    for rows, widths, given in each:
        x = torch.full((1, rows, widths[ranks.rank]), ranks.rank, dtype=dtype)
        x += torch.arange(rows)[:, None] * 10
        gathered.append(shares.gather(x, given))
    return gathered


def wait_for_memory(path: str, ready: Any) -> None:
    """Open the memory as rank 1 of 2, say so, and do nothing more."""
    assert shared_memory.open_memory(path, 1, 2)
    ready.set()
    time.sleep(60)


def numbers_of(rank: int, index: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    return torch.randint(-9, 9, (1, length), generator=generator).float()
