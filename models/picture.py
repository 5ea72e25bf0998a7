"""The text model inside a picture model: its part of config.json, and the names of its tensors.

    config_of(config)                           # text_config, as of a text model
    name_of("language_model.model.norm.weight") # "model.norm.weight"; None for what reads pictures

A text's positions are those of its tokens: rotations in sections (mrope) are ordinary ones.
"""

import re
from collections.abc import Mapping
from typing import Any

NOTE = "pictures are left out: this is the text model of a picture model"
WITH_SOUND = "pictures and sound are left out: this is the text model of a model of all three"
# model_type of a text_config that another family's model computes.
TYPES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",  # as published it has no text_config
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# What published text_configs leave to transformers' classes, beyond what models/registry.py knows.
ABSENT = {"gemma3_text": {"vocab_size": 262208, "num_attention_heads": 8}}
SECTIONS = ("mrope_section", "mrope_interleaved")
READS_PICTURES = re.compile(
    r"(?:model\.)?(?:vision_tower|vision_model|visual|multi_modal_projector|audio_tower"
    r"|embed_vision|embed_audio|vision_adapter|vision_projection)\."
)
PREFIX = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(?!lm_head)")


def is_picture_model(config: Mapping[str, Any]) -> bool:
    inner = config.get("text_config")
    return isinstance(inner, Mapping) or str(config.get("model_type")) in TYPES


def note_of(config: Mapping[str, Any]) -> str:
    """What to say of a picture model's config."""
    return WITH_SOUND if config.get("audio_config") else NOTE


def config_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's config; the config itself where it is of no picture model."""
    if not is_picture_model(config):
        return config
    inner = dict(config.get("text_config") or config)
    kind = str(inner.get("model_type"))
    inner = {**ABSENT.get(kind, {}), **inner, "model_type": TYPES.get(kind, kind)}
    if "tie_word_embeddings" in config:  # transformers ties the whole model as this one says
        inner["tie_word_embeddings"] = config["tie_word_embeddings"]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := inner.get(key), Mapping) and not rope.keys().isdisjoint(SECTIONS):
            rope = {name: rope[name] for name in rope if name not in SECTIONS}
            inner[key] = {
                name: "default" if value == "mrope" else value for name, value in rope.items()
            }
    for key in ("vision_config", "vision_start_token_id", "vision_end_token_id"):
        inner.pop(key, None)
    return inner


def name_of(name: str) -> str | None:
    """A tensor's name in a text model; None for one that pictures need alone."""
    if READS_PICTURES.match(name):
        return None
    return PREFIX.sub("model.", name).removeprefix("language_model.")
