"""AutoRound's own folders: layers laid out as GPTQ, AWQ or compressed-tensors do.

packing_format names the layout. Layers in GPTQ's have no g_idx. Zeros are stored less 1 in those
that are called gptq or zp, and as they are in the others. https://github.com/intel/auto-round
"""

from typing import Any

from quantbench.errors import CheckpointError
from quantbench.models.formats import awq, compressed_tensors, gptq
from quantbench.models.formats.quantized import AUTO_ROUND, HINT, Layout, require
from quantbench.text import shown

METHOD = "auto-round"
_PLAIN = {"quant_method": gptq.METHOD, "checkpoint_format": "gptq_v2"}
_ONE_LESS = {"quant_method": gptq.METHOD, "checkpoint_format": "gptq"}
_AWQ = {"quant_method": awq.METHOD, "version": "gemm"}
# What each packing_format is in the words of another method, behind "auto_round:".
_PACKINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("", "exllamav2", "torch", "tritonv2"), _PLAIN),
    **dict.fromkeys(("auto_gptq", "gptq", "gptqmodel", "torch_zp", "tritonv2_zp"), _ONE_LESS),
    **dict.fromkeys(("auto_awq", "awq"), _AWQ),
    "llm_compressor": {"quant_method": compressed_tensors.METHOD},
}
_MODULES = {module.METHOD: module for module in (gptq, awq, compressed_tensors)}


def check(config: dict[str, Any], where: str) -> None:
    packing = config.get("packing_format", "auto_round:exllamav2")
    if not isinstance(packing, str) or _packing(packing) not in _PACKINGS:
        *others, last = (f"auto_round:{name}" for name in _PACKINGS if name)
        raise CheckpointError(
            f"{where}: packing_format {shown(packing)} is not read; {', '.join(others)} and {last} "
            f"are, {HINT}"
        )
    require(where, {key: config.get(key) for key in AUTO_ROUND}, AUTO_ROUND, ())
    module, inner = _inner(config)
    module.check(inner, where)


def label(config: dict[str, Any]) -> str:
    module, inner = _inner(config)
    return str(module.label(inner))


def layouts(config: dict[str, Any]) -> list[Layout]:
    module, inner = _inner(config)
    return list(module.layouts(inner))


def _packing(name: str) -> str:
    """auto_round:auto_gptq is auto_gptq, and so is auto_round:auto_gptq:exllamav2."""
    return name.removeprefix("auto_round").removeprefix(":").partition(":")[0]


def _inner(config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The module that reads the layers, and the configuration in its words."""
    words = _PACKINGS[_packing(config.get("packing_format", ""))]
    module = _MODULES[words["quant_method"]]
    if module is compressed_tensors:
        weights = {
            "num_bits": config.get("bits"),
            "type": "int" if config.get("data_type", "int") == "int" else "float",
            "group_size": config.get("group_size"),
        }
        return module, words | {
            "config_groups": {"all": {"targets": ["Linear"], "weights": weights}}
        }
    return module, {key: config[key] for key in config if key != "packing_format"} | words
