"""Which quantization should I run here? Measured, repeatable answers for Llama-family models.

    model = quantbench.load("tiny", quantization="int8wo")  # quantized as it is read
    generator = quantbench.Generator(model, cache_size=256)
    generator.generate(prompt, max_new_tokens=100).tokens
    torchao.quantize_(module, quantbench.config("int4wo-64"))   # any nn.Module

Everything is imported when it is first used: `import quantbench` takes no time. The command
`quantbench --help` lists what can be done without writing Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantbench.generate import Generator
    from quantbench.models import load
    from quantbench.quantize import config

__all__ = ["Generator", "__version__", "config", "load"]


def __getattr__(name: str) -> Any:
    value: Any
    match name:
        case "Generator":
            from quantbench.generate import Generator as value
        case "load":
            from quantbench.models import load as value
        case "config":
            from quantbench.quantize import config as value
        case "__version__":
            value = _version()
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    """The installed distribution's version; "unknown" in a checkout that is not installed."""
    from importlib import metadata

    try:
        return metadata.version("quantbench")
    except metadata.PackageNotFoundError:
        return "unknown"
