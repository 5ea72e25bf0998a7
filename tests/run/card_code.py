"""What inductor makes of a decoding step on a card that need not be here.

    python -m tests.run.card_code 90 '[["int8wo", 2, "dense"]]'     compute capability 9.0
    [{"scheme": "int8wo", "rows": 2, …, "launches": 31, "large": [], "eager": [], …}]

Weights, caches and tokens are fake tensors on "cuda", dynamo and inductor work as they do beside a
card, and stop where Triton would compile: nothing is allocated, and nothing runs. What is left out:
the choice of block sizes, joint_graph_constant_folding, which computes on the device, and patterns
of attention and padding, which inductor traces there when it begins.
"""

import contextlib
import dataclasses
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

MODEL, LAYERS, POSITIONS = "Meta-Llama-3-8B", 2, 1024
GUARD = Path(__file__).with_name("no_card.cpp")
# As NVIDIA's datasheets have an A100 and an H100; inductor reads these to choose its kernels' form.
PROCESSORS = {75: 40, 80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 120: 170}


def put_in(capability: int) -> None:
    """From now on this process compiles as if it had a card: 90 is compute capability 9.0."""
    with tempfile.TemporaryDirectory() as folder:
        library, at = f"{folder}/no_card.so", Path(torch.__file__).parent
        where = [f"-I{at}/include", f"-L{at}/lib", "-lc10"]
        subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", GUARD, *where, "-o", library],
                       check=True)  # fmt: skip
        torch.ops.load_library(library)
    major, minor = divmod(capability, 10)
    properties = SimpleNamespace(
        name="a card", major=major, minor=minor, multi_processor_count=PROCESSORS[capability],
        total_memory=80 << 30, L2_cache_size=40 << 20, regs_per_multiprocessor=1 << 16,
        warp_size=32, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        shared_memory_per_block=48 << 10, shared_memory_per_block_optin=163 << 10,
        shared_memory_per_multiprocessor=164 << 10, gcnArchName="", is_integrated=False, uuid="",
    )  # fmt: skip
    of_cuda: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_properties": properties, "get_device_capability": (major, minor),
        "get_device_name": "a card", "mem_get_info": (80 << 30, 80 << 30),
        "is_bf16_supported": True, "get_arch_list": [f"sm_{capability}"], "current_stream": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
        "synchronize": None, "_lazy_init": None, "_exchange_device": 0, "_maybe_exchange_device": 0,
    }  # fmt: skip
    for name, value in of_cuda.items():
        setattr(torch.cuda, name, _always(value))
    numbers = ("getDevice", "setDevice", "exchangeDevice", "maybeExchangeDevice")
    for name in (*numbers, "getCurrentRawStream"):
        setattr(torch._C, f"_cuda_{name}", _always(0))
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch.utils import _triton

    for kind in (CudaInterface, CudaInterface.Worker):
        for name in ("is_available", "current_device", "device_count", "get_device_properties"):
            setattr(kind, name, staticmethod(_always(of_cuda[name])))
    known = {"get_compute_capability": capability, "is_triton_capable": True}
    known |= {"raise_if_triton_unavailable": None, "get_raw_stream": 0}
    for name, value in known.items():
        setattr(CudaInterface, name, staticmethod(_always(value)))
    for name in ("has_triton", "has_triton_package"):
        setattr(_triton, name, _always(True))
    joint_graph.lazy_init = post_grad.lazy_init = _always(None)
    from tests.ops.gpu_compiler import driver_of

    driver_of(capability)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *given, **named: value


class Made(BaseException):
    """What inductor made is known."""


@contextlib.contextmanager
def stopped_before_triton() -> Iterator[list[str]]:
    """The sources that inductor makes; none is compiled."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    sources: list[str] = []

    def stop(graph: GraphLowering) -> None:
        wrapper = graph.codegen()[0]
        sources.append(wrapper.value)
        raise Made

    usual = GraphLowering.compile_to_module
    GraphLowering.compile_to_module = stop
    try:
        with config.patch(force_disable_caches=True, joint_graph_constant_folding=False):
            yield sources
    finally:
        GraphLowering.compile_to_module = usual


def on_card(tensor: Tensor) -> Tensor:
    """A fake tensor like this one of the meta device."""
    if type(tensor) is not Tensor:
        names, context = tensor.__tensor_flatten__()
        inner = {name: on_card(getattr(tensor, name)) for name in names}
        return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


def source_of(
    scheme: str, rows: int, cache: str = "dense", model: str = MODEL, kernel: str = "auto"
) -> tuple[str, dict[str, Any]]:
    """The source of a compiled step, and which kernels it has and how large its buffers may be."""
    from torch._subclasses import FakeTensor, FakeTensorMode

    from quantbench.generate import Generator
    from quantbench.models import build
    from quantbench.models.presets import preset
    from quantbench.quantize import triton
    from quantbench.quantize.registry import quantizer_of
    from quantbench.quantize.spec import parse
    from quantbench.run import decoding

    triton.check_finite = lambda *parts: None  # there are no numbers
    decoding._is_plain = lambda parameter: type(parameter.data) in (Tensor, FakeTensor)
    torch._dynamo.reset()
    config = dataclasses.replace(preset(model), num_layers=LAYERS)
    with torch.device("meta"):
        made = build(config).to(torch.bfloat16)
    weights = [p.numel() for p in made.layers.parameters() if p.dim() > 1]
    quantizer = quantizer_of(parse(scheme), torch.device("cuda", 0), torch.bfloat16, kernel)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with stopped_before_triton() as sources, torch.no_grad():
        for name in [name for name, module in made.named_modules() if module._parameters]:
            layer = quantizer.quantized(name, made.get_submodule(name))
            given = {key: p.data for key, p in layer._parameters.items() if p is not None}
            with mode:
                for key, tensor in given.items():
                    layer._parameters[key] = nn.Parameter(on_card(tensor), False)
                made.set_submodule(name, quantizer.built(name, layer))
        with mode:
            generator = Generator(made, rows, POSITIONS, cache, compile_decode=True)
            token = torch.zeros(rows, 1, dtype=torch.long, device="cuda")
            position = torch.zeros(1, dtype=torch.long, device="cuda")
            with contextlib.suppress(Made):
                generator.decode_one_token(generator.decoder, token, position, generator.sampling)
    (source,) = sources
    stored = generator.caches[0].key_codes.numel()
    return source, {
        "kernels": dict(quantizer.ran),
        "attention": generator.attention.name,
        "least": min(*weights, stored),  # numbers of the smallest weight, or a cache's side
    }


# ---------------------------------------------------------------------------------- reading it


def reading(source: str, least: int) -> dict[str, Any]:
    """What a source launches, and what of it no decoding step should have."""
    functions = re.findall(r"^def (\w+)\(args\):\n((?: .*\n|\n)+)", source, re.M)
    code = {name: re.sub("#.*", "", body) for name, body in functions}
    lines = [line for body in code.values() for line in body.splitlines()]
    partitions = [name for name in code if name.startswith("partition_")]

    def launches(name: str) -> int:
        own = len(re.findall(r"\.run\(|extern_kernels\.\w+\(|= torch\.ops\.", code[name]))
        return own + sum(map(launches, re.findall(r"= (\w*subgraph_\d+)\(", code[name])))

    sizes = [
        (shape, math.prod(map(int, re.findall(r"\d+", shape))))
        for line in lines
        for shape in re.findall(r"empty_strided_cuda\((\(.*?\)),", line)
    ]
    return {
        "launches": sum(map(launches, partitions)),
        "partitions": len(partitions),
        "large": [shape for shape, count in sizes if count >= least],
        "eager": sorted({op for line in lines for op in re.findall(r"(?:aten|prims)\.\w+", line)}),
        "waits": [line.strip() for line in lines if re.search(r"\.item\(|\.cpu\(|_cpu\(\(", line)],
    }


if __name__ == "__main__":
    put_in(int(sys.argv[1]))
    for case in json.loads(sys.argv[2]):
        source, about = source_of(*case)
        if len(sys.argv) > 3:
            Path(sys.argv[3]).write_text(source)
        print(json.dumps({"case": case, **about, **reading(source, about["least"])}), flush=True)
