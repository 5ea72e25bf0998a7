"""The `quantization_config` of a checkpoint that compressed-tensors wrote: is it one that we read?

compressed-tensors (https://github.com/vllm-project/compressed-tensors) is the format of vLLM's
llm-compressor, and one of those that Hugging Face transformers reads. Read here are checkpoints
whose weights alone are quantized, symmetrically, to 4 or 8 bits. `models/checkpoints/compressed.py`
turns them into full precision. Everything else would change the result, and is an error.
"""

from collections.abc import Mapping
from typing import Any

from quantbench.errors import CheckpointError
from quantbench.models.accepted import OBJECT
from quantbench.text import shown

METHOD = "compressed-tensors"
_FORMATS = ("int-quantized", "naive-quantized", "float-quantized", "pack-quantized")

# The values that each key may have. A key that is not here changes no weight (_HARMLESS), or is an
# error unless it is null.
_CONFIG: dict[str, tuple[Any, ...]] = {
    "quant_method": (METHOD,),
    "format": (*_FORMATS, "mixed-precision"),
    "quantization_status": ("compressed",),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
_GROUP: dict[str, tuple[Any, ...]] = {
    "format": (*_FORMATS, None),
    "input_activations": (None,),
    "output_activations": (None,),
}
_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (8, 4),
    "type": ("int", "float"),
    "symmetric": (True,),
    "strategy": ("channel", "group", "tensor"),
    "dynamic": (False,),
    "actorder": (None, False, "weight", "static"),  # of others the columns are permuted
}
# Which weights are quantized, and the size of a group, show in the tensors themselves.
_HARMLESS = {
    "config_groups", "global_compression_ratio", "group_size", "ignore", "observer",
    "observer_kwargs", "scale_dtype", "targets", "version", "weights", "zp_dtype",
}  # fmt: skip
_HINT = "or give the full-precision checkpoint and --quantization"


def check(config: Any, where: object) -> None:
    """Raise CheckpointError unless checkpoints with this `quantization_config` are read.

    where: the file that holds it, for the message.
    """
    where = f"{where}: quantization_config"
    OBJECT.check(where, "its value", config)
    if config.get("quant_method") != METHOD:
        raise CheckpointError(
            f"{where}: quant_method {shown(config.get('quant_method'))} is not read; "
            f"{METHOD} is, {_HINT}"
        )
    _require(where, config, _CONFIG)
    groups = config.get("config_groups")
    OBJECT.check(where, "config_groups", groups)
    for name, group in groups.items():
        within = f"{where}: {shown(name)}"
        OBJECT.check(where, f"config_groups.{name}", group)
        OBJECT.check(within, "weights", group.get("weights"))
        _require(within, group, _GROUP)
        _require(f"{within}: weights", group["weights"], _WEIGHTS)


def _require(where: str, given: Mapping[str, Any], accepted: Mapping[str, tuple[Any, ...]]) -> None:
    for key, value in given.items():
        if key in accepted and value not in accepted[key]:
            takes = " or ".join("null" if v is None else str(v) for v in accepted[key] if v != {})
            what = "given" if isinstance(value, Mapping) else shown(value)
            raise CheckpointError(f"{where}: {key} {what} is not read; {takes} is, {_HINT}")
        if key not in accepted and key not in _HARMLESS and value is not None:
            raise CheckpointError(
                f"{where}: key {shown(key)} is not understood, and it may change the result"
            )
