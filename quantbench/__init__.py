"""Which quantization should I run here? Measured, repeatable answers for Llama-family models.

    model = quantbench.load("tiny", quantization="int8wo")  # quantized as it is read
    generator = quantbench.Generator(model, cache_size=256)
    generator.generate(prompt, max_new_tokens=100).tokens
    torchao.quantize_(module, quantbench.config("int4wo-64"))   # any nn.Module

Everything is imported when it is first used: `import quantbench` takes no time. The command
`quantbench --help` lists what can be done without writing Python.
"""

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantbench.generate import Generator
    from quantbench.models import load
    from quantbench.quantize import config

__all__ = ["Generator", "__version__", "config", "load"]
MODULES = {"Generator": "generate", "config": "quantize", "load": "models"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            value = metadata.version(__name__)
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            value = "unknown"
    elif name in MODULES:
        value = getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
