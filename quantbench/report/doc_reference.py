"""Tables of the documentation that the program itself answers: options, schemes, cache sizes."""

from collections.abc import Callable, Mapping, Sequence

from quantbench.log.config import RunConfig, option_table
from quantbench.quality.thresholds import CLASSES
from quantbench.quantize import spec
from quantbench.report.columns import size
from quantbench.report.doc_source import api, fields
from quantbench.report.documents import Block, table

# The model that the last column of `cache_bytes` is about.
LLAMA_3_1 = {"heads": 8, "head_dim": 128, "layers": 32, "positions": 131072}
# For each cache the layout of keys and values, and the bytes of one head's key by head_dim.
CACHE_BYTES: Mapping[str, tuple[str, Callable[[int], float]]] = {
    "dense": ("as `--precision` has them", lambda width: 2 * width),
    "int8": ("a scale for each token and head", lambda width: width + 2),
    "fp8": ("a scale for each token and head", lambda width: width + 2),
    "int4": ("a scale for every 32 of head_dim", lambda width: width / 2 + width / 16),
}


def options(words: Sequence[str]) -> str:
    """options: those of generate.py."""
    rows = []
    for name, option in option_table().items():
        takes = option.kind.metavar or ""
        default = getattr(RunConfig(), name)
        given = f"`--{name}{' ' * bool(takes)}{takes}`"
        shown = "off" if default is False else "" if default is None else str(default)
        rows.append((given, shown, option.help.replace("|", "\\|")))
    return table(("option", "default", "meaning"), rows)


def schemes(words: Sequence[str]) -> str:
    """schemes: the forms of --quantization."""
    rows = [(f"`{form}`", said) for form, said in spec.numerics().items()]
    return table(("name", "what it does to the linear layers"), rows)


def cache_bytes(words: Sequence[str]) -> str:
    """cache_bytes: what each KV cache takes, from shapes."""
    layers, positions = LLAMA_3_1["layers"], LLAMA_3_1["positions"]
    rows = []
    for name, (how, of_head) in CACHE_BYTES.items():
        each = 2 * LLAMA_3_1["heads"] * of_head(LLAMA_3_1["head_dim"])  # keys and values
        rows.append((f"`{name}`", how, f"{each:.0f}", size(each * layers * positions)))
    headings = (
        *("`--kv_cache`", "keys and values"),
        *("bytes per position and layer", f"all {layers} layers, {positions} positions"),
    )
    return table(headings, rows)


def kl_classes(words: Sequence[str]) -> str:
    """kl_classes: what a KL divergence means, and what published models have."""
    rows = [(f"{most:g}", word, source) for most, word, source in CLASSES]
    return table(("KL, nats a token, up to", "class", "a published model"), rows)


# quant_method and format of Hugging Face folders: label in logs, bits per weight in the file, and
# the form that kernels read.
METHODS = (
    ("`gptq`, 4 bits, groups of 128, symmetric", "gptq-4-128", 4 + 20 / 128,
     "int-4-128-float16-none"),
    ("the same with zero points", "gptq-4-128", 4 + 20 / 128, "uint-4-128-float16-uint8"),
    ("`awq`, 4 bits, version GEMM", "awq-4-128", 4 + 20 / 128, "uint-4-128-float16-uint8"),
    ("`compressed-tensors`, `pack-quantized`", "w4a16-128", 4 + 16 / 128,
     "int-4-128-bfloat16-none"),
    ("`int-quantized`, `naive-quantized`", "w8a16", 8, "int-8-0-bfloat16-none"),
    ("`float-quantized`, and `fp8` without blocks", "fp8", 8, "fp8-8-0-bfloat16-none"),
    ("the same in blocks of 128 by 128", "fp8", 8, "fp8-8-128-float32-none"),
    ("`nvfp4-pack-quantized`", "nvfp4", 4.5, "fp4-4-16-e4m3-none"),
    ("`mxfp4-pack-quantized`", "mxfp4", 4.25, "fp4-4-32-e8m0-none"),
    ("`mxfp4` (gpt-oss)", "mxfp4", 4.25, "fp4-4-32-e8m0-none"),
    ("`bitsandbytes` nf4, nested scales", "bnb-nf4", 4 + 8 / 64, "nf4-4-64-float32-none"),
    ("`bitsandbytes` int8", "bnb-int8", 8, "int-8-0-float32-none"),
    ("`torchao` in safetensors, float8", "fp8", 8, "fp8-8-0-float32-none"),
    ("`torchao` in safetensors, int4", "w4a16-128", 4.25, "int-4-128-bfloat16-bfloat16"),
)  # fmt: skip


def bits_here(form: str) -> float:
    """Bits per weight of a large matrix in the order in which the C++ kernels read it."""
    import torch

    from quantbench.ops.cpu import linear
    from quantbench.quantize.registry import SCHEMES

    asked = spec.parse_layer(f"stored-{form}")
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    packed = SCHEMES[type(asked)].quantize(weight, asked)
    return 8 * linear.pack(packed.parts, 4096).numel() / weight.numel()


def file_methods(words: Sequence[str]) -> str:
    """file_methods: quantized Hugging Face folders, and their bits per weight."""
    rows = [
        (method, f"`{label}`", f"{bits:.3g}", f"{bits_here(form):.3g}")
        for method, label, bits, form in METHODS
    ]
    return table(("`quant_method`, format", "label in logs", "in the file", "here"), rows)


def gguf_types(words: Sequence[str]) -> str:
    """gguf_types: GGUF's types that kernels read, and their bits per weight."""
    import gguf

    from quantbench.models.formats.gguf_blocks import PACKED

    rows = []
    for name, kind in PACKED.items():
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        here = bits_here(str(kind.form).removeprefix("stored-"))
        rows.append((name, f"{8 * size / values:.4g}", f"{here:.4g}"))
    return table(("type", "in the file", "here, on the CPU"), rows)


TABLES: Mapping[str, Block] = {
    "api": api,
    "fields": fields,
    "file_methods": file_methods,
    "gguf_types": gguf_types,
    "options": options,
    "schemes": schemes,
    "cache_bytes": cache_bytes,
    "kl_classes": kl_classes,
}
