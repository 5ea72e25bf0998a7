"""Which quantization should I run here? Measured, repeatable answers for Llama-family models.

    model = quantbench.load("tiny", quantization="int8wo")  # quantized as it is read
    generator = quantbench.Generator(model, cache_size=256)
    generator.generate(prompt, max_new_tokens=100).tokens
    torchao.quantize_(module, quantbench.config("int4wo-64"))   # any nn.Module

Everything is imported when it is first used: `import quantbench` takes no time. The command
`quantbench --help` lists what can be done without writing Python.
"""

import importlib
import os
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantbench.generate import Generator
    from quantbench.models import load
    from quantbench.quantize import config

__all__ = ["Generator", "__version__", "config", "load"]
# In a checkout models, quantize, kv_cache and generate.py stand at the top. The links to them in
# this folder, which tools follow, are plain files where Git makes no links: on Windows, in a zip.
_TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_TOP, "kv_cache", "base.py")):
    __path__.insert(0, _TOP)
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
