"""Text models inside picture models, against transformers' own."""

import pytest
import torch
import transformers

from quantbench.errors import CheckpointError
from quantbench.generate import Generator
from quantbench.models.formats import open_checkpoint
from quantbench.models.loading import load_model
from tests.models.hugging_face import OF_STATES, SIZES, TOKENS, assert_near, rewritten
from tests.models.test_families import DELTA_EXPERTS

VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
OF_QWEN = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "patch_size": 14,
           "out_hidden_size": SIZES["hidden_size"]}  # fmt: skip
TEXT = {**SIZES, "num_key_value_heads": 2}
MROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0}
# What the published files say in addition to what transformers writes.
PUBLISHED = {
    "attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mlp_only_layers": [],
    "full_attention_interval": 4,
}  # fmt: skip
QWEN_3_5 = {
    **TEXT, "head_dim": 16, "num_hidden_layers": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
                        "mrope_section": [2, 1, 1]},
}  # fmt: skip
KINDS = {
    "gemma3": {"text_config": {**TEXT, "head_dim": 16, "query_pre_attn_scalar": 16,
                               "sliding_window": 8, "model_type": "gemma3_text"},
               "vision_config": {**VISION, "model_type": "siglip_vision_model"},
               "mm_tokens_per_image": 4},
    "mistral3": {"text_config": {**TEXT, "head_dim": 16, "model_type": "mistral"},
                 "vision_config": {**VISION, "head_dim": 16, "model_type": "pixtral"}},
    "qwen2_5_vl": {"text_config": {**TEXT, "rope_parameters": MROPE}, "vision_config": OF_QWEN},
    "gemma4": {"text_config": {**TEXT, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8,
                               "vocab_size_per_layer_input": TEXT["vocab_size"],
                               "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 1,
                               "layer_types": ["full_attention"] * 3, "pad_token_id": 0},
               "vision_config": {**VISION, "head_dim": 16, "num_key_value_heads": 2,
                                 "patch_size": 4, "position_embedding_size": 64},
               "audio_config": {"hidden_size": 32, "num_hidden_layers": 1,
                                "num_attention_heads": 2, "output_proj_dims": 32}},
    "muse_glimmer": {"text_config": {**TEXT, "head_dim": 16, "num_hidden_layers": 5,
                                     "sliding_window": 8, "final_logit_softcapping": 3.0},
                     "vision_config": {"hidden_size": 32, "intermediate_size": 32,
                                       "num_hidden_layers": 1, "num_attention_heads": 2},
                     "out_hidden_size": 128, "projector_hidden_size": 32},
    "qwen3_vl": {"text_config": {**TEXT, "head_dim": 16, "rope_parameters": MROPE},
                 "vision_config": {**OF_QWEN, "deepstack_visual_indexes": [0]}},
    "qwen3_5": {"text_config": {**QWEN_3_5, **PUBLISHED}, "vision_config": OF_QWEN},
    "qwen3_5_moe": {"text_config": {**QWEN_3_5, **PUBLISHED, **DELTA_EXPERTS},
                    "vision_config": OF_QWEN},
}  # fmt: skip


def folder_of(kind, folder):
    config = transformers.AutoConfig.for_model(kind, **KINDS[kind])
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    made = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for name, parameter in made.requires_grad_(False).named_parameters():
        parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.25)
    made.save_pretrained(folder)
    return folder, made(input_ids=TOKENS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_picture_model(kind, tmp_path):
    folder, expected = folder_of(kind, tmp_path)
    checkpoint = open_checkpoint(str(folder))
    checkpoint.tensors()
    assert checkpoint.notes[0].startswith(
        "pictures and sound are left out" if kind == "gemma4" else "pictures are left out"
    )
    assert_near(load_model(str(folder))(TOKENS), expected, OF_STATES if "qwen3_5" in kind else 1e-4)
    with rewritten(folder) as tensors:  # in the other spelling of the prefix
        for name in [name for name in tensors if "language_model." in name]:
            spellings = ("model.language_model.", "language_model.model.")
            here, other = sorted(spellings, key=lambda part: not name.startswith(part))
            tensors[other + name.removeprefix(here)] = tensors.pop(name)
        if "lm_head.weight" in tensors:
            tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    assert_near(load_model(str(folder))(TOKENS), expected, OF_STATES if "qwen3_5" in kind else 1e-4)
    with rewritten(folder) as tensors:
        tensors["mtp.norm.weight"] = torch.ones(1)  # of the layers that draft
    load_model(str(folder))
    with rewritten(folder) as tensors:
        tensors["model.third_tower.weight"] = torch.ones(1)
    with pytest.raises(CheckpointError, match="third_tower.weight, which the model would not read"):
        load_model(str(folder))


def test_experts_stacked_as_published(tmp_path):
    """transformers writes each on its own, and reads both."""
    folder, expected = folder_of("qwen3_5_moe", tmp_path)
    with rewritten(folder) as tensors:
        for prefix in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
            parts = {"gate_proj": [], "up_proj": [], "down_proj": []}
            for part, stack in parts.items():
                while f"{prefix}.experts.{len(stack)}.{part}.weight" in tensors:
                    stack.append(tensors.pop(f"{prefix}.experts.{len(stack)}.{part}.weight"))
            gate, up, down = map(torch.stack, parts.values())
            tensors[f"{prefix}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
            tensors[f"{prefix}.experts.down_proj"] = down
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    assert_near(theirs(input_ids=TOKENS).logits, expected)
    assert_near(load_model(str(folder))(TOKENS), expected, OF_STATES)


@pytest.mark.parametrize("kind", ["gemma4", "muse_glimmer"])
def test_through_caches_beyond_the_window(kind, tmp_path):
    """Muse-Glimmer has no separate text model in transformers, so test_families has none."""
    folder, _ = folder_of(kind, tmp_path)
    made = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(3, TEXT["vocab_size"] - 2, (3, 70))
    expected, ours = made(input_ids=tokens).logits, load_model(str(folder))
    for chunk in (70, 64, 7, 1):
        generator = Generator(ours, 3, 70)
        starts = range(0, 70, chunk)
        parts = zip(starts, tokens.split(chunk, 1), strict=True)
        found = torch.cat([generator.forward(part, start) for start, part in parts], 1)
        assert_near(found, expected)
    assert made.num_parameters() > ours.config.parameters()
