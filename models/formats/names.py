"""How other projects name the parameters of models/llama.py.

A parameter name maps to one or more checkpoint tensors, which are stacked along their first
dimension: a projection that is fused in the model comes from several.
"""

import re
from collections.abc import Callable, Collection, Mapping

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+")  # its number; # in the tables

_HUGGING_FACE = {
    "attention_norm": ("input_layernorm",),
    "attention.wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.wo": ("self_attn.o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
    "feed_forward.w13": ("mlp.gate_proj", "mlp.up_proj"),
    "feed_forward.w2": ("mlp.down_proj",),
    "feed_forward.router": ("mlp.gate",),
    "feed_forward.experts.#.w13": ("mlp.experts.#.gate_proj", "mlp.experts.#.up_proj"),
    "feed_forward.experts.#.w2": ("mlp.experts.#.down_proj",),
    "feed_forward.shared.w13": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "feed_forward.shared.w2": ("mlp.shared_expert.down_proj",),
    "feed_forward.shared_gate": ("mlp.shared_expert_gate",),
}
_HUGGING_FACE_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "layer_embeddings.weight": "model.embed_tokens_per_layer.weight",
    "layer_projection.weight": "model.per_layer_model_projection.weight",
    "layer_norm.weight": "model.per_layer_projection_norm.weight",
}
_META = {  # gpt-fast and torchao use these names, too; their checkpoints may hold wqkv fused
    "attention_norm": ("attention_norm",),
    "attention.wqkv": ("attention.wq", "attention.wk", "attention.wv"),
    "attention.wo": ("attention.wo",),
    "ffn_norm": ("ffn_norm",),
    "feed_forward.w13": ("feed_forward.w1", "feed_forward.w3"),
    "feed_forward.w2": ("feed_forward.w2",),
}

NameMap = Callable[[str], tuple[str, ...]]
Layers = Mapping[str, tuple[str, ...]]  # a layer's parameters; # is an expert's number


def of_architecture(weights: Layers, tensors: Collection[str] | None = None) -> NameMap:
    """From a parameter to the Hugging Face tensors that it is stacked from. Some parameters of a
    layer have the names `weights`, if the checkpoint's `tensors`, where given, have any of them.
    Some models without an output layer are published without "model."."""
    stems = {part.partition("#")[0] for parts in weights.values() for part in parts}
    known = tensors is None or any(f".{stem}" in name for name in tensors for stem in stems)
    layers = _HUGGING_FACE | dict(weights if known else {})
    top, prefix = _HUGGING_FACE_TOP, "model."
    top = top | {name: weights[name][0] for name in top.keys() & weights.keys()}
    if tensors is not None and top["tok_embeddings.weight"] not in tensors:
        if top["tok_embeddings.weight"].removeprefix(prefix) in tensors:
            top, prefix = {ours: name.removeprefix(prefix) for ours, name in top.items()}, ""
    return lambda name: _translate(name, layers, top, f"{prefix}layers")


def meta(name: str) -> tuple[str, ...]:
    """The names of the tensors in a Meta, gpt-fast or torchao checkpoint that the parameter `name`
    is stacked from."""
    return _translate(name, _META, {}, "layers")


def _translate(
    name: str, layer_names: Layers, top: Mapping[str, str], prefix: str
) -> tuple[str, ...]:
    match = _LAYER.fullmatch(name)
    if match is None:
        return (top.get(name, name),)
    number, module = match.groups()
    module, dot, kind = (module, "", "") if module in layer_names else module.rpartition(".")
    expert = _EXPERT.search(module)
    parts = layer_names.get(_EXPERT.sub("#", module), (module,))
    if expert:
        parts = tuple(part.replace("#", expert[0]) for part in parts)
    return tuple(f"{prefix}.{number}.{part}{dot}{kind}" for part in parts)


hugging_face = of_architecture({})  # Llama's names
