"""The first ten minutes on a card: are the numbers right, and if so, how fast is it?

    python -m benchmarks.gpu_first right     at most five minutes; exit code 1: something is wrong
    python -m benchmarks.gpu_first fast      likewise; refuses where `right` found wrong numbers
    make gpu-first                           both

`right` compares each Triton kernel and each scheme with its reference on the card, CUDA graphs with
what they captured, and logits of the embedded model with the CPU's. `fast` reads memory by a
captured read, then times decoding in Llama-3-8B's shape by scheme, single products, batches, caches
and prompts. Checks are in the order of their value: each part has its seconds, what does not fit is
left out by name, and no number is taken for granted that a wrong part would explain. Every check is
a line of a table, and goes to FOLDER/CALL.json at once; FOLDER/CALL.tar.gz holds the table, too.

Nothing is installed, and no C++ is built: torch, Triton, pytest and what pyproject.toml requires
have to be there. `--device cpu` carries out the same checks on smaller problems, Triton's kernels
in its interpreter and nothing compiled or captured, to see that they run.
"""

import os
import sys

if __name__ == "__main__":
    if "cpu" in sys.argv:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    os.environ["CXX"] = "false"  # the C++ kernels take minutes to build, and none runs on a card

import argparse
import functools
import json
import math
import subprocess
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from quantbench import devices
from quantbench.devices import stored_bytes
from quantbench.generate import Generator
from quantbench.kv_cache import CACHES
from quantbench.models.loading import load_model
from quantbench.ops.attention import decode_attention
from quantbench.quantize.registry import Quantizer, kernels_for
from quantbench.quantize.spec import SHOWN, parse
from quantbench.run.decoding import caches_of

LIMIT = 285  # seconds of a call, packing included
BFLOAT16 = torch.bfloat16
# Kernels that no product is compared or timed with alone: inductor's needs a compiled step.
NOT_ALONE = ("reference", "inductor", "cpu")
Check = Callable[[], dict[str, Any] | None]  # numbers to print; AssertionError: they are wrong
Checks = Iterator[tuple[str, Check]]


@dataclass(frozen=True)
class Card:
    """Where the checks run, and how large their problems are."""

    device: torch.device
    ahead: bool = False  # a card's kernels are compiled here

    @property
    def small(self) -> bool:
        return self.device.type == "cpu" and not self.ahead

    def of(self, large: Any, small: Any) -> Any:
        return small if self.small else large

    def loaded(self, scheme: str, path: str = "tiny", layers: int | None = None) -> tuple[Any, str]:
        """A model in bfloat16, and its kernels: whole ones take minutes in Triton's interpreter."""
        spec = parse(scheme)
        kernel = plain(spec) if self.small else "auto"
        quantizer = Quantizer(spec, self.device, BFLOAT16, kernel)
        model = load_model(path, self.device, BFLOAT16, layers, quantizer)
        return model, ", ".join(quantizer.ran)


def plain(spec: Any) -> str:
    """The kernel of a scheme that is plain torch."""
    return kernels_for(spec, "auto", torch.device("cpu"), BFLOAT16)[-1]


# ---------------------------------------------------------------------------------- is it right?


def machine(card: Card) -> Checks:
    def versions() -> dict[str, Any]:
        import torchao
        import triton

        named = {"torch": torch, "triton": triton, "torchao": torchao}
        return devices.describe(card.device) | {k: v.__version__ for k, v in named.items()}

    yield "versions", versions
    if not card.small:
        yield "Triton's kernels, compiled in parallel", functools.partial(compiled_ahead, card)


FORMS = [
    *(("int", 8, None), ("int", 4, 64), ("fp6", 6, None), ("int", 2, 64), ("fp4", 4, 32)),
    *(("nf4", 4, 64), ("2:4", 4, 64), ("fp8", 8, None), ("fp4", 4, 16), ("int", 3, 64)),
]
ROWS = (1, 2, 8, 64)


def products(card: Card) -> Checks:
    """The Triton kernels of linear layers, within the bounds of their contract."""
    from tests.ops import linear_contract, packed_weights

    contract = card.of(linear_contract.ON_GPU, linear_contract.TRITON)
    N, K = card.of((1030, 4096), (18, 64))
    for form in card.of(FORMS, FORMS[:2]):
        for rows in card.of(ROWS, (1, 8)):

            def check(form: Any = form, rows: int = rows) -> None:
                zero = form[0] == "int" and form[2] is not None
                weight = packed_weights.packed(form, N, K, zero=zero, device=card.device.type)
                x = torch.randn(rows, K, device=card.device).to(BFLOAT16)
                linear_contract.check(contract, x, weight)

            yield f"{packed_weights.name(form)}, rows {rows}", check


# rows, query heads, key heads, head_dim, positions; how scores are made, as Scoring takes it
PROBLEMS = [((1, 32, 8, 128, 3000), ()), ((2, 8, 8, 64, 700), (0.1, 30.0))]


def attention(card: Card) -> Checks:
    """The Triton kernel over each kind of cache, within the bounds of its contract."""
    from tests.ops import attention_contract

    contract = card.of(attention_contract.ON_GPU, attention_contract.TRITON)
    for kind in card.of(list(CACHES), ["int8"]):
        for shape, how in card.of(PROBLEMS, PROBLEMS[1:]):
            B, H, K, D, T = card.of(shape, (1, 4, 2, 32, 20))

            def check(B=B, H=H, K=K, D=D, T=T, kind=kind, how=how) -> None:  # type: ignore[no-untyped-def]
                given = attention_contract.problem(B, H, K, T, D, BFLOAT16, kind, 0, card.device)
                for first, count in ((0, T), (T - 3, T // 2)):
                    attention_contract.check(contract, *given, [first] * B, [count] * B, *how)

            yield f"{kind}, {H} heads of {D}, {T} positions", check


def graphs(card: Card) -> Checks:
    """A captured kernel reads what its inputs hold now."""
    from tests.ops import attention_contract, packed_weights

    def product() -> None:
        from quantbench.ops.triton.linear import linear

        size = card.of(1024, 64)
        weight = packed_weights.packed(("int", 4, 64), size, size, device=card.device.type)
        x = torch.randn(1, size, device=card.device).to(BFLOAT16)
        replay, y = captured(lambda: linear(x, weight), card)
        x.copy_(torch.randn_like(x))
        same(replay(), y, linear(x, weight))

    def depth() -> None:
        H, T, D = card.of((8, 4096, 64), (2, 12, 32))
        given = attention_contract.problem(1, H, H // 2, T, D, BFLOAT16, "int8", 0, card.device)
        first, count = (torch.tensor([n], device=card.device) for n in (0, 1))
        step = functools.partial(decode_attention, "triton", *given, first, count)
        replay, y = captured(step, card)
        for filled in (T // 3, T):
            count.fill_(filled)
            same(replay(), y, step())

    def same(ran: Any, y: Tensor, expected: Tensor) -> None:
        y = ran if card.small else y
        assert torch.equal(y, expected), "the replay differs from a new launch"

    yield "a product, other activations", product
    yield "attention, other depths", depth


def schemes(card: Card) -> Checks:
    """Each kernel of each scheme, compared with plain torch on the same device."""
    N, K = card.of((1024, 2048), (64, 128))
    names = [name for name in SHOWN if name != "none" and not parse(name).calibrated]
    for name in card.of(names, ["int8wo", "int4wo-64"]):
        spec = parse(name)
        taken = kernels_for(spec, "auto", card.device, BFLOAT16)
        for kernel in [name for name in taken if name not in NOT_ALONE]:
            for rows in card.of((1, 8, 64), (1, 8)):

                def check(spec: Any = spec, kernel: str = kernel, rows: int = rows) -> dict:
                    plain = nn.Linear(K, N, False, card.device, BFLOAT16).requires_grad_(False)
                    x = torch.randn(1, rows, K, device=card.device).to(BFLOAT16)
                    layers = (
                        Quantizer(spec, card.device, BFLOAT16, each)("layer", like(plain))
                        for each in (kernel, "reference")
                    )
                    off = distance(*(layer(x) for layer in layers))
                    # bfloat16's roundings come to 0.004; one column of N that is wrong, to 0.04.
                    assert off < 0.02, f"off by {off:.3g} of the numbers' size"
                    return {"off by": off}

                yield f"{name} by {kernel}, rows {rows}", check


def like(layer: nn.Linear) -> nn.Linear:
    copy = nn.Linear(layer.in_features, layer.out_features, False, "meta")
    copy.weight = nn.Parameter(layer.weight.clone(), False)
    return copy


def distance(values: Tensor, expected: Tensor) -> float:
    """The root mean square of the differences, in units of the expected numbers'."""
    off, size = (t.detach().double().cpu().square().mean().sqrt() for t in
                 (values.cpu() - expected.cpu(), expected))  # fmt: skip
    return float(off / size)


LOGITS = [  # scheme, cache
    *[("none", "dense"), ("int8wo", "dense"), ("int4wo-64", "dense"), ("fp6", "dense")],
    *[("int8dq", "dense"), ("float8wo", "dense"), ("none", "int8"), ("none", "int4")],
    *[("none", "fp8"), ("mxfp4", "dense"), ("sparse-marlin", "dense"), ("uintx-2-64", "dense")],
]


def logits(card: Card) -> Checks:
    """The embedded model's, of a prompt and of a step after it, against the CPU's by plain torch:
    bfloat16 moves those by as much again."""
    for scheme, cache in card.of(LOGITS, LOGITS[1:2]):

        def check(scheme: str = scheme, cache: str = cache) -> dict:
            exact, rounded = (by_plain_torch(scheme, cache, d) for d in (torch.float32, BFLOAT16))
            noise = distance(rounded, exact)
            generator = Generator(card.loaded(scheme)[0], 1, 64, cache, "modules")
            off = distance(two_readings(generator.forward, card.device), rounded)
            # Two results, each off by the noise, differ by 1.4 times the noise.
            assert off <= 3 * noise, f"off by {off:.3g}; bfloat16 on the CPU by {noise:.3g}"
            return {"off by": off, "bfloat16 on the CPU by": noise}

        yield f"{scheme}, cache {cache}", check


def by_plain_torch(scheme: str, cache: str, dtype: torch.dtype) -> Tensor:
    """`two_readings` of the embedded model's weights in bfloat16 on the CPU; dtype: of the rest."""
    device, spec = torch.device("cpu"), parse(scheme)
    quantizer = Quantizer(spec, device, BFLOAT16, plain(spec))
    model = load_model("tiny", device, BFLOAT16, transform=quantizer).to(dtype)
    memories = caches_of(CACHES[cache], model.config, 1, 64, dtype, device, "torch")

    def forward(tokens: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + tokens.shape[1])
        return model(tokens, positions, memories)

    return two_readings(forward, device)


@torch.no_grad()
def two_readings(forward: Callable[[Tensor, int], Tensor], device: torch.device) -> Tensor:
    """Logits (2, V): behind a prompt of 32 tokens, and behind one more."""
    tokens = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(0)).to(device)
    pieces = [forward(tokens[:, :32], 0), forward(tokens[:, 32:], 32)]
    return torch.cat(pieces, 1)[0, -2:].float().cpu()


def compiled(card: Card) -> Checks:
    """Compiled steps write what eager ones write, in one CUDA graph."""
    from torch._dynamo.utils import counters

    every = [("none", "dense"), ("int8wo", "int8"), ("fp6", "dense")]
    for scheme, cache in card.of(every, every[:2]):

        def check(scheme: str = scheme, cache: str = cache) -> dict:
            model, _ = card.loaded(scheme)
            prompt = torch.arange(1, 9, device=card.device)[None]
            counters.clear()
            eager, graph = (
                Generator(model, 1, 64, cache, "modules", compile_decode=how)
                .generate(prompt, card.of(24, 4)).tokens
                for how in (False, not card.small)
            )  # fmt: skip
            alike = float((eager == graph).float().mean())
            skips = counters["inductor"]["cudagraph_skips"]
            assert alike >= 0.8, f"{alike:.0%} of the tokens are the same"
            assert not skips, f"{skips} parts of the step are not in a CUDA graph"
            return {"tokens alike": alike}

        yield f"{scheme}, cache {cache}", check


# ---------------------------------------------------------------------------------- how fast is it?

SHAPE, LAYERS = "dummy:Meta-Llama-3-8B", 8
STEPS = ("none", "int8wo", "int4wo-64", "fp6", "int8dq", "float8wo", "uintx-2-64", "mxfp4",
         "sparse-marlin", "bnb-nf4")  # fmt: skip


def captured(function: Callable[[], Any], card: Card) -> tuple[Callable[[], Any], Any]:
    """(replays a CUDA graph of the function, the result that each replay writes)."""
    if card.small:
        return function, None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = function()
    return graph.replay, result


def seconds(replay: Callable[[], Any], card: Card, times: int = 9) -> float:
    """The median of `times` replays, after one, by the device's own clock."""
    if not card.small:
        replay()
    moments = [(devices.moment(card.device), replay(), devices.moment(card.device))
               for _ in range(card.of(times, 1))]  # fmt: skip
    devices.synchronize(card.device)
    return median(devices.seconds_between(before, after) for before, _, after in moments)


@functools.cache
def read_rate(card: Card) -> float:
    """Bytes a second of ten captured reads."""
    block = torch.ones(card.of(1 << 28, 1 << 20), dtype=torch.int32, device=card.device)
    replay, _ = captured(lambda: [block.amax() for _ in range(10)], card)
    return 10 * block.nbytes / seconds(replay, card)


def bandwidth(card: Card) -> Checks:
    def copy() -> dict:
        block = torch.ones(card.of(1 << 28, 1 << 20), dtype=torch.int32, device=card.device)
        to = torch.empty_like(block)
        replay, _ = captured(lambda: [to.copy_(block) for _ in range(5)], card)
        return {"GB/s, read and written": 10 * block.nbytes / seconds(replay, card) / 1e9}

    def probe() -> dict:
        from quantbench.run.bandwidth import BandwidthProbe

        return {"GB/s": BandwidthProbe(card.device).measure() / 1e9}

    yield "captured reads", lambda: {"GB/s": read_rate(card) / 1e9}
    yield "copies", copy
    if not card.small:
        yield "as `ab` reads it", probe


@functools.lru_cache(maxsize=1)
def model_of(scheme: str, card: Card) -> tuple[Any, str]:
    """The shape's model, and its kernels."""
    return card.loaded(scheme, *card.of((SHAPE, LAYERS), ("tiny", 1)))


def step(scheme: str, rows: int, card: Card) -> dict:
    """A compiled step; inductor's block sizes are not tuned, which would take minutes a scheme."""
    model, kernels = model_of(scheme, card)
    began = time.perf_counter()
    generator = Generator(model, rows, 256, compile_decode=not card.small, decoder="modules")
    prompt = torch.ones(rows, 8, dtype=torch.long, device=card.device)
    generator.generate(prompt, 5)  # compiles, records and replays
    compiling = time.perf_counter() - began
    count = card.of(64, 2)
    each = generator.generate(prompt, count + 1).decode_seconds / count
    weights = [module for name, module in model.named_modules() if name != "tok_embeddings"]
    size = sum(stored_bytes(p) for module in weights for p in module.parameters(recurse=False))
    share = size / each / read_rate(card)
    figures = {"ms": each * 1e3, "GB": size / 1e9, "of the read": share, "compiled in s": compiling}
    return {"kernels": kernels} | figures | launches(generator, prompt, card)


def launches(generator: Generator, prompt: Tensor, card: Card) -> dict:
    """Kernels of a step, and the milliseconds in which one of them runs."""
    if card.small:
        return {}
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        generator.generate(prompt, 11)
    with torch.profiler.profile(activities=kinds) as shorter:
        generator.generate(prompt, 1)

    def sums(profile: Any) -> tuple[int, float]:
        events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        return len(events), sum(event.device_time for event in events) / 1e3

    counts, busy = zip(sums(profile), sums(shorter), strict=True)
    return {"launches": (counts[0] - counts[1]) / 10, "busy ms": (busy[0] - busy[1]) / 10}


def steps(card: Card) -> Checks:
    for scheme in card.of(STEPS, ("none", "int8wo")):
        yield f"{scheme}, row 1", functools.partial(step, scheme, 1, card)


def batches(card: Card) -> Checks:
    for scheme in card.of(("none", "int8wo", "int4wo-64", "int8dq"), ("none",)):
        yield f"{scheme}, rows 8", functools.partial(step, scheme, 8, card)


def single_products(card: Card) -> Checks:
    """Layers of the shape in a CUDA graph, weights from memory: more copies than caches hold."""
    shapes = {"w13": (28672, 4096), "w2": (4096, 14336), "output": (128256, 4096)}
    few = {"small": (16, 64)}
    for scheme in card.of((*STEPS, "int8dq-int4wo-32"), ("none", "int8wo")):
        spec = parse(scheme)
        taken = kernels_for(spec, "auto", card.device, BFLOAT16)
        for kernel in [name for name in taken if name not in NOT_ALONE]:
            for layer, (N, K) in card.of(shapes, few).items():

                def check(spec=spec, kernel=kernel, N=N, K=K) -> dict:  # type: ignore[no-untyped-def]
                    plain = nn.Linear(K, N, False, card.device, BFLOAT16).requires_grad_(False)
                    made = [Quantizer(spec, card.device, BFLOAT16, kernel)("layer", like(plain))]
                    size = sum(map(stored_bytes, made[0].parameters()))
                    for _ in range(card.of(math.ceil((256 << 20) / size), 1) - 1):
                        copy = Quantizer(spec, card.device, BFLOAT16, kernel)("layer", like(plain))
                        made.append(copy)
                    figures = {}
                    for rows in card.of((1, 4, 16, 64, 2048), (1,)):
                        x = torch.randn(1, rows, K, device=card.device).to(BFLOAT16)
                        replay, _ = captured(lambda x=x: [m(x) for m in made], card)  # type: ignore[misc]
                        each = seconds(replay, card, 5) / len(made)
                        figures[f"µs at {rows}"] = each * 1e6
                        if rows == 1:
                            figures["of the read"] = size / each / read_rate(card)
                    return figures

                yield f"{layer}: {scheme} by {kernel}", torch.no_grad()(check)


def caches(card: Card) -> Checks:
    from tests.ops import attention_contract

    for T in card.of((512, 8192, 65536), (12,)):
        for kind in card.of(list(CACHES), ["int4"]):

            def check(kind: str = kind, T: int = T) -> dict:
                shape = card.of((1, 32, 8, T, 128), (1, 2, 1, T, 32))
                query, key, value = attention_contract.problem(
                    *shape, BFLOAT16, kind, 0, card.device
                )
                where = [torch.tensor([n], device=card.device) for n in (0, T)]
                each = functools.partial(decode_attention, "triton", query, key, value, *where)
                count = card.of(8, 1)
                replay, _ = captured(lambda: [each() for _ in range(count)], card)
                taken = seconds(replay, card) / count
                parts = [t for s in (key, value) for t in (s.codes, s.scale) if t is not None]
                size = sum(map(stored_bytes, parts))
                return {"µs": taken * 1e6, "of the read": size / taken / read_rate(card)}

            yield f"{kind}, {T} positions", check


def prompts(card: Card) -> Checks:
    S = card.of(2048, 16)
    for scheme in card.of(("none", "int8dq", "int8wo", "int4wo-64", "fp6"), ("none",)):

        def check(scheme: str = scheme) -> dict:
            model, kernels = model_of(scheme, card)
            generator = Generator(model, 1, S + 8, decoder="modules")
            prompt = torch.ones(1, S, dtype=torch.long, device=card.device)
            runs = [generator.generate(prompt, 1).prefill_seconds for _ in range(card.of(4, 1))]
            return {"kernels": kernels, "ms": min(runs) * 1e3}

        yield f"{scheme}, {S} tokens, eager", check


# ---------------------------------------------------------------------------------- carrying it out


@dataclass(frozen=True)
class Part:
    checks: Callable[[Card], Checks]
    seconds: int  # that it may take; what parts before it left comes on top
    stops: bool = False  # whether nothing after it means anything where it is wrong


RIGHT = {
    "machine": Part(machine, 50, stops=True),
    "products": Part(products, 60, stops=True),
    "attention": Part(attention, 30, stops=True),
    "graphs": Part(graphs, 10, stops=True),
    "logits": Part(logits, 50),
    "schemes": Part(schemes, 35),
    "compiled": Part(compiled, 45),
}
FAST = {
    "bandwidth": Part(bandwidth, 15),
    "steps": Part(steps, 120),
    "batches": Part(batches, 35),
    "layers": Part(single_products, 50),
    "caches": Part(caches, 20),
    "prompts": Part(prompts, 40),
}
CALLS = {"right": RIGHT, "fast": FAST}


def compiled_ahead(card: Card) -> dict:
    """Triton's cache filled with the kernels of `products` and `attention`, by all processors."""
    major, minor = torch.cuda.get_device_capability(card.device)
    processors = torch.cuda.get_device_properties(card.device).multi_processor_count
    count = min(16, len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "benchmarks.gpu_first", "compile", "--share"]
    started = [
        subprocess.Popen([*command, f"{i},{count},{major}{minor},{processors}"],
                         env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, stderr=subprocess.PIPE)
        for i in range(count)
    ]  # fmt: skip
    ends, failed = time.monotonic() + 60, []
    for process in started:
        try:
            _, error = process.communicate(timeout=max(1, ends - time.monotonic()))
            if process.returncode:
                failed.append(error.decode()[-300:])
        except subprocess.TimeoutExpired:
            process.kill()
            failed.append("60 s were over")
    return {"processes": count, "failed": failed or 0}  # then they are compiled when they run


def compile_share(index: int, count: int, capability: int, processors: int) -> None:
    """Compile every count-th kernel of the checks, on a machine that need not have the card."""
    from quantbench.ops.triton import attention as kernels
    from tests.ops.gpu_compiler import compile_instead

    compile_instead(capability)
    kernels._processors = lambda device: processors  # type: ignore[assignment]
    kernels._has_fp8 = lambda device: capability >= 89  # type: ignore[assignment]
    card = Card(torch.device("cpu"), ahead=True)
    every = [check for part in (products, attention) for _, check in part(card)]
    for check in every[index::count]:
        try:
            check()
        except AssertionError:
            pass  # nothing was computed


def carry_out(call: str, card: Card, folder: Path, limit: float = LIMIT) -> int:
    """Do a call's checks within their seconds, print and keep each. 1: something is wrong."""
    records: list[dict] = []
    table: list[str] = []
    ends = time.monotonic()
    last = ends + limit

    def keep(line: str, **record: Any) -> None:
        print(line, flush=True)
        table.append(line)
        records.append(record)
        text = json.dumps({"call": call, "checks": records}, indent=1)
        (folder / f"{call}.json").write_text(text)
        (folder / f"{call}.txt").write_text("\n".join(table) + "\n")

    folder.mkdir(parents=True, exist_ok=True)
    wrong = 0
    try:
        for name, part in CALLS[call].items():
            ends = min(ends + part.seconds, last)
            before, left = wrong, []
            for what, check in part.checks(card):
                if time.monotonic() > ends:
                    left.append(what)
                    continue
                began = time.monotonic()
                figures, error = outcome(check)
                wrong += error is not None
                taken = time.monotonic() - began
                says = f"WRONG: {error}" if error else ", ".join(map(shown, figures.items()))
                found = {"wrong": error, "figures": figures, "seconds": taken}
                line = f"{name:10} {what:42} {says or 'right'}  [{taken:.1f} s]"
                keep(line, part=name, check=what, **found)
                if error and lost(card):
                    keep(f"{name:10} the card answers no more: ended", part=name, wrong="lost")
                    return 1
            if left:
                listed = "; ".join(left)
                keep(f"{name:10} left out for want of time: {listed}", part=name, left=left)
            if wrong > before and part.stops:
                keep(f"{name:10} is wrong: the rest would mean nothing", part=name, wrong="ended")
                break
    finally:
        with tarfile.open(folder / f"{call}.tar.gz", "w:gz") as archive:
            for kind in ("json", "txt"):
                if (folder / f"{call}.{kind}").exists():
                    archive.add(folder / f"{call}.{kind}", f"gpu-first/{call}.{kind}")
    print(f"{wrong} wrong; all of it: {folder}/{call}.tar.gz")
    return int(wrong > 0)


def outcome(check: Check) -> tuple[dict, str | None]:
    """Figures, and what is wrong: one line, where it is known which."""
    try:
        return check() or {}, None
    except Exception as error:
        traceback.print_exc(limit=-3)
        lines = str(error).strip().splitlines() or [""]
        return {}, f"{type(error).__name__}: {lines[0][:200]}"


def lost(card: Card) -> bool:
    """Whether an error has taken the process' context of the card, for good."""
    try:
        devices.synchronize(card.device)
    except RuntimeError:
        return True
    return False


def shown(figure: tuple[str, Any]) -> str:
    name, value = figure
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("call", choices=[*CALLS, "compile"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("build/gpu-first"))
    parser.add_argument("--share", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.call == "compile":
        compile_share(*map(int, given.share.split(",")))
        return 0
    card = Card(torch.device(given.device))
    if not card.small and not torch.cuda.is_available():
        print("gpu-first: torch finds no card; --device cpu tries the checks")
        return 2
    if given.call == "fast":
        before = given.folder / "right.json"
        checks = json.loads(before.read_text())["checks"] if before.exists() else []
        if any(check.get("wrong") for check in checks):
            print(f"gpu-first: {before} has wrong numbers: how fast they come means nothing")
            return 1
        options = devices.KINDS["cuda"].compile_options
        options["coordinate_descent_tuning"] = False  # type: ignore[index]
    torch.manual_seed(0)
    return carry_out(given.call, card, given.folder)


if __name__ == "__main__":
    sys.exit(main())
