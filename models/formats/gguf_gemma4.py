"""GGUF files of Gemma 4: what llama.cpp's converter writes of layers with and without a window, in
the words of config.json; and names of tensors."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantbench.errors import CheckpointError
from quantbench.text import shown

KIND = "gemma4_text"
WORDS = {  # behind "gemma4."
    "attention.key_length_swa": "head_dim",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_used_count": "top_k_experts",
}
WEIGHTS = {
    "scale": ("layer_scalar",),
    "feed_forward.experts.#.w13": ("mlp.experts.#.gate_proj", "mlp.experts.#.up_proj"),
}
# Tensors of a router that have neither weight nor bias in their names: ours by theirs.
_SCALES = {
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
OTHERS = {"rope.dimension_count_swa"}  # read below
_INPUTS = "per_layer_token_embd.weight"
_PATTERN, _SHARED = "attention.sliding_window_pattern", "attention.shared_kv_layers"


def described(
    file: Path, metadata: Mapping[str, Any], blocks: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Further keys of the config.json that the model has. Raises CheckpointError."""

    def get(word: str, default: Any = None) -> Any:
        return metadata.get(f"gemma4.{word}", default)

    def each(word: str) -> list[Any]:
        value = get(word)
        values = value if isinstance(value, list) else [value] * len(narrow)
        if len(values) != len(narrow) or not all(type(count) is int for count in values):
            raise refused(word)
        return values

    def refused(word: str) -> CheckpointError:
        return CheckpointError(
            f"{file}: metadata 'gemma4.{word}' {shown(get(word))} is not supported"
        )

    narrow, shared = get(_PATTERN), get(_SHARED, 0)
    if not isinstance(narrow, list) or len(narrow) != get("block_count"):
        raise refused(_PATTERN)
    if type(shared) is not int or not 0 <= shared < len(narrow):
        raise refused(_SHARED)
    for word, kind in (("key_length", ""), ("key_length_swa", "_swa")):
        rotated = f"rope.dimension_count{kind}"
        for other in (f"attention.value_length{kind}", rotated):
            if get(other, get(f"attention.{word}")) != get(f"attention.{word}"):
                raise refused(other)
    widths, heads = each("feed_forward_length"), each("attention.head_count_kv")
    first = len(narrow) - shared
    if len(set(widths[:first])) > 1 or len(set(widths[first:])) > 1:
        raise refused("feed_forward_length")
    yield "intermediate_size", widths[0]
    if widths[-1] != widths[0]:
        if widths[-1] != 2 * widths[0]:
            raise refused("feed_forward_length")
        yield "use_double_wide_mlp", True
    of_kind = {
        kind: {count for count, is_narrow in zip(heads, narrow, strict=True) if is_narrow == kind}
        for kind in (True, False)
    }
    if any(len(counts) > 1 for counts in of_kind.values()):
        raise refused("attention.head_count_kv")
    yield "num_key_value_heads", min(of_kind[True] or of_kind[False])
    full = [i for i, is_narrow in enumerate(narrow) if not is_narrow]
    if not full:
        raise refused(_PATTERN)
    wide = {"head_dim": get("attention.key_length"), "num_key_value_heads": heads[full[-1]]}
    yield "per_layer_config", {str(i): wide for i in full}
    yield "attention_k_eq_v", not any(f"blk.{i}.attn_v.weight" in blocks for i in full[:1])
    if _INPUTS in blocks:
        yield "vocab_size_per_layer_input", blocks[_INPUTS].shape[0]
    yield "enable_moe_block", bool(get("expert_count"))


def in_hugging_face(name: str) -> str:
    """The name of a tensor, that of Hugging Face where the gguf package has no table for it."""
    layer, _, rest = name.removeprefix("blk.").partition(".")
    return f"model.layers.{layer}.{_SCALES[rest]}.weight" if rest in _SCALES else name
