"""Architectures: published sizes, Hugging Face's own configs as oracle, and what is refused."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quantbench.errors import CheckpointError, UsageError
from quantbench.models.formats.meta import from_params
from quantbench.models.hugging_face import from_hugging_face
from quantbench.models.loading import load_model
from quantbench.models.presets import PRESETS, preset
from quantbench.models.registry import ARCHITECTURES
from tests.models import hugging_face
from tests.models.hugging_face import FAMILIES, LLAMA_3_1
from tests.models.refused import refusal
from tests.models.small import SMALL

# What the model cards and Hugging Face's num_parameters() say.
PUBLISHED = {
    "Llama-2-7b-chat-hf": 6_738_415_616,
    "Llama-2-13b-chat-hf": 13_015_864_320,
    "Llama-2-70b-chat-hf": 68_976_648_192,
    "Meta-Llama-3-8B": 8_030_261_248,
    "Meta-Llama-3.1-8B": 8_030_261_248,
    "Meta-Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Mistral-Small-24B-Base-2501": 23_572_403_200,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "CodeLlama-7b-Python-hf": 6_738_415_616,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Mixtral-8x22B-v0.1": 140_620_634_112,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "OLMoE-1B-7B-0924": 6_919_161_856,
    "Qwen3.8-27B": 26_895_998_464,  # without the part that sees
    "LFM2.5-1.2B-Instruct": 1_170_340_608,
    "GLM-4-9B-0414": 9_400_279_040,
    "Olmo-3-1025-7B": 7_298_011_136,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b-it": 999_885_952,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    assert preset(name).parameters() == PUBLISHED[name]


# As transformers' models/gemma4/convert_gemma4_weights.py has them.
E2B, OTHERS = (["sliding_attention"] * count + ["full_attention"] for count in (4, 5))
GEMMA_4S = {
    "gemma-4-E2B": {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
                    "layer_types": E2B * 7, "num_attention_heads": 8, "num_key_value_heads": 1,
                    "num_kv_shared_layers": 20, "use_double_wide_mlp": True},
    "gemma-4-E4B": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42,
                    "layer_types": OTHERS * 7, "num_attention_heads": 8, "num_key_value_heads": 2,
                    "num_kv_shared_layers": 18},
    "gemma-4-31B": {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
                    "layer_types": OTHERS * 10, "num_attention_heads": 32,
                    "num_key_value_heads": 16, "num_global_key_value_heads": 4},
    "gemma-4-26B-A4B": {"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
                        "layer_types": OTHERS * 5, "num_attention_heads": 16,
                        "num_key_value_heads": 8, "num_global_key_value_heads": 2,
                        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
                        "moe_intermediate_size": 704},
}  # fmt: skip
LARGE = {
    "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "sliding_window": 1024,
    "use_bidirectional_attention": "vision", "max_position_embeddings": 262144,
}  # fmt: skip
# Billions without pictures and sound, by the models' cards; of Muse-Glimmer by its GGUF files,
# which hold no more. The cards of E2B and E4B count other parts, too.
BILLIONS = {"gemma-4-31B": "30.7", "gemma-4-26B-A4B": "25.2", "Muse-Glimmer-30B": "28"}


@pytest.mark.parametrize("name", GEMMA_4S)
def test_gemma_4s_presets_are_those_of_the_converter(name):
    parts = GEMMA_4S[name] | ({} if "-E" in name else LARGE) | {"final_logit_softcapping": 30.0}
    theirs = AutoConfig.for_model("gemma4_text", **parts)
    assert from_hugging_face(theirs.to_dict(), name) == preset(name)
    with torch.device("meta"):
        count = AutoModelForCausalLM.from_config(theirs).num_parameters()
    assert preset(name).parameters() == count + theirs.num_hidden_layers  # a number of each layer


@pytest.mark.parametrize("name", BILLIONS)
def test_presets_have_as_many_parameters_as_the_cards_say(name):
    digits = len(BILLIONS[name].partition(".")[2])
    assert f"{preset(name).parameters() / 1e9:.{digits}f}" == BILLIONS[name]


def test_a_preset_may_carry_its_organisation_and_is_written_exactly():
    assert preset("meta-llama/Meta-Llama-3-8B") is PRESETS["Meta-Llama-3-8B"]
    with pytest.raises(UsageError, match="Meta-Llama-3-8B"):
        preset("Meta-Llama-3-8b")


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_agrees_with_hugging_face(family):
    """The number of parameters: test_families.py."""
    theirs = FAMILIES[family]
    whole, short = (
        from_hugging_face({"model_type": theirs.model_type, **content}, family)
        for content in (theirs.to_dict(), theirs.to_diff_dict())
    )
    assert_agrees(whole, theirs)
    assert short == whole


def assert_agrees(ours, theirs):
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.layers[0].softcap == getattr(theirs, "attn_logit_softcapping", None)
    rows = [(spec.rope_theta, bool(spec.rope_scaling), spec.window) for spec in ours.layers]
    assert rows == list(layers_of(theirs))


def layers_of(theirs):
    """Rotary base, whether it is scaled, and the window of each layer of transformers' config."""
    window = getattr(theirs, "sliding_window", None) or None
    usual = "sliding_attention" if window else "full_attention"
    for kind in getattr(theirs, "layer_types", None) or [usual] * theirs.num_hidden_layers:
        rope = theirs.rope_parameters.get(kind, theirs.rope_parameters)
        scaled = rope["rope_type"] == "llama3"
        yield rope["rope_theta"], scaled, window if kind == "sliding_attention" else None


@pytest.mark.parametrize("kind", sorted({config.model_type for config in FAMILIES.values()}))
def test_absent_keys_mean_what_hugging_face_takes_them_for(kind):
    absent = ("model_type", "num_key_value_heads", "max_position_embeddings")
    required = {key: value for key, value in SMALL.items() if key not in absent}
    required |= {"num_attention_heads": 32}
    theirs = AutoConfig.for_model(kind, **required)
    ours = from_hugging_face({"model_type": kind, **required}, kind)
    assert_agrees(ours, theirs)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 256 // 32)
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    if ours.mixture:
        assert ours.mixture.num_experts == theirs.num_experts
        assert ours.mixture.experts_per_token == theirs.num_experts_per_tok
        assert ours.mixture.normalized == getattr(theirs, "norm_topk_prob", kind == "mixtral")


def test_the_old_and_the_new_spelling_of_rotary_scaling_are_one():
    scaling = {key: value for key, value in LLAMA_3_1.items() if key != "rope_type"}
    old = SMALL | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = SMALL | {"rope_parameters": {"rope_theta": 5e5, **LLAMA_3_1}}
    assert from_hugging_face(old, "a") == from_hugging_face(new, "a")


# What transformers 4 wrote for every model, if not only differences (PretrainedConfig's fields).
OF_TRANSFORMERS_4 = {
    **dict.fromkeys(
        "add_cross_attention do_sample early_stopping is_decoder is_encoder_decoder "
        "output_attentions output_hidden_states output_scores remove_invalid_values "
        "return_dict_in_generate tf_legacy_loss tie_encoder_decoder torchscript "
        "use_bfloat16".split(),
        False,
    ),
    **dict.fromkeys(
        "bad_words_ids begin_suppress_tokens cross_attention_hidden_size decoder_start_token_id "
        "exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id "
        "prefix problem_type sep_token_id suppress_tokens task_specific_params "
        "tokenizer_class".split()
    ),
    "chunk_size_feed_forward": 0, "diversity_penalty": 0.0, "encoder_no_repeat_ngram_size": 0,
    "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "length_penalty": 1.0,
    "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1,
    "num_beams": 1, "num_return_sequences": 1, "pruned_heads": {}, "repetition_penalty": 1.0,
    "return_dict": True, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0,
}  # fmt: skip
# Model → its model_type, and the keys of its published config.json that we ignore.
IGNORED = {
    "SmolLM2": ("llama", {"is_llama_config": True, "rope_interleaved": False}),
    "SmolLM2-Instruct": ("llama", {"transformers.js_config": {"dtype": "q4f16"}}),
    "LLaMA 1": ("llama", {"max_sequence_length": 2048}),
    "Qwen2.5": ("qwen2", {"use_mrope": False, "max_window_layers": 28}),
    "Gemma 2": ("gemma2", {"cache_implementation": "hybrid", "sliding_window_size": 4096}),
    "Gemma 3": ("gemma3_text", {"cache_implementation": "hybrid", "sliding_window_pattern": 6}),
    "Phi-4-mini": (
        "phi3",
        {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
         "embd_pdrop": 0.0, "resid_pdrop": 0.0, "auto_map": {"AutoConfig": "x.Phi3Config"}},
    ),
    "fine-tunes": (
        "mistral",
        {"tokenizer_class": "LlamaTokenizer", "neftune_noise_alpha": 5,
         "_attn_implementation": "sdpa", "attn_implementation": "sdpa", "flash_attn": True},
    ),
    "generation": (
        "qwen3",
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_length": 9},
    ),
    "saved whole": ("llama", OF_TRANSFORMERS_4),
    "kept from GGUF": ("llama", {"_model_name_or_path": "b", "unk_token_id": 0}),
    "off": ("llama", {"logit_scale": None, "residual_multiplier": 1.0, "clip_qkv": False}),
    "rotary": (
        "llama", {"rope_scaling": {"rope_type": "linear", "factor": 1.0, "beta_fast": None}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("published", IGNORED)
def test_keys_that_transformers_does_not_read_change_nothing(published):
    kind, keys = IGNORED[published]
    given = SMALL | {"model_type": kind}
    if published == "rotary":
        given |= {"rope_scaling": {"rope_type": "linear", "factor": 1.0}}
    assert from_hugging_face(given | keys, "a") == from_hugging_face(given, "a")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_key_that_transformers_declares_is_understood(kind):
    """Its config class writes them all, or those that are not at their default."""
    sizes = {key: value for key, value in SMALL.items() if key != "model_type"}
    if kind == "granitemoehybrid":  # whose defaults are Mamba layers and experts
        sizes |= {"layer_types": ["attention"] * SMALL["num_hidden_layers"]}
        sizes |= {"num_local_experts": 0}
    if kind == "lfm2_moe":  # whose class has none, and whose model needs them
        sizes |= {"layer_types": ["full_attention"] * SMALL["num_hidden_layers"]}
    theirs = AutoConfig.for_model(kind, **sizes, bos_token_id=1, eos_token_id=2, pad_token_id=None)
    whole, short = (
        from_hugging_face({"model_type": kind} | json.loads(theirs.to_json_string(diff)), kind)
        for diff in (False, True)
    )
    assert whole == from_hugging_face(OF_TRANSFORMERS_4 | theirs.to_dict(), kind)
    assert whole == short


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}, "'mamba' (Mamba) are not"),
        ("granitemoehybrid", {"num_local_experts": 4}, "num_local_experts is 4; accepted is 0"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2; accepted is a"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "'all' is not supported"),
        ("gemma4_text", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config"),
        ("gemma4_text", {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1"),
        ("muse_glimmer_text", {"layer_rope_theta": ["a"]}, "layer_rope_theta is ['a']; accepted"),
    ],
)
def test_what_later_families_cannot_have_is_refused_in_one_line(kind, changes, message):
    usual = {"layer_types": ["attention"] * 2, "num_local_experts": 0}
    usual = usual if kind == "granitemoehybrid" else {}
    config = SMALL | {"num_hidden_layers": 2, "model_type": kind} | usual | changes
    config |= {"shared_intermediate_size": 96} if usual else {}
    assert message in refusal(CheckpointError, from_hugging_face, config, "a")


SPARSE = FAMILIES["qwen-3-moe"].to_dict()
OLMOE = FAMILIES["olmoe"].to_dict()


@pytest.mark.parametrize(
    "change, message",
    [
        (SPARSE | {"num_experts_per_tok": 7}, "goes through 7 experts, and there are 6"),
        (SPARSE | {"num_local_experts": "six"}, "num_local_experts is 'six'"),
        (SPARSE | {"norm_topk_prob": 1}, "norm_topk_prob is 1; accepted is true or false"),
        (SPARSE | {"mlp_only_layers": [-1]}, "accepted is a list of layers' numbers, from 0"),
        (SPARSE | {"shared_expert_intermediate_size": 8}, "_expert_intermediate_size' is not und"),
        (SPARSE | {"moe_intermediate_size": None, "intermediate_size": None},
         "has no intermediate_size"),
        (OLMOE | {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        (SPARSE | {"model_type": "deepseek_v3"}, "model_type 'deepseek_v3' is not supported"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_size": None}, "config has no hidden_size"),
        ({"num_key_value_heads": 3}, "cannot share 3 key/value heads"),
        ({"hidden_size": 65}, "hidden_size 65 does not divide into 4 heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; only 'silu' is"),
        *(
            ({key: value}, f"{key!r} is not understood")
            for key, value in {
                "attention_multiplier": 0.5, "rope_interleaved": True, "lm_head_bias": True,
                "use_mrope": True, "logit_scale": 0.1, "use_qk_norm": True,
                "pruned_heads": {"0": [1]}, "compression_config": {"format": "dense"},
                "quantization": {"bits": 4},
            }.items()
        ),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'; accepted is a list"),
        ({"rope_scaling": {"type": "axial", "factor": 4.0}}, "rotary scaling 'axial'"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn rotary scaling lacks 'factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rotary scaling lacks"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"model_type": "gemma2", "layer_types": ["full_attention", "chunked_attention"]},
         "layer_types 'chunked_attention', 'full_attention' of 2 layers"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_followed_is_refused(change, message):
    given = change if change.get("num_experts") else SMALL | change
    line = refusal(CheckpointError, from_hugging_face, given, "folder")
    assert line.startswith("folder") and message in line


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_more_layers_than_any_model_has_are_refused_at_once(kind):
    """Before a family makes lists of a part for each layer, which would not end."""
    config = SMALL | {"model_type": kind, "num_hidden_layers": 2**31 - 1}
    line = refusal(CheckpointError, lambda: from_hugging_face(config, "mine"))
    assert "num_hidden_layers is 2147483647; accepted is" in line


@pytest.mark.parametrize(
    "name, params",
    [
        ("Llama-2-70b-hf",
         {"dim": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "multiple_of": 4096,
          "ffn_dim_multiplier": 1.3}),
        ("Llama-3.2-1B",
         {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "multiple_of": 256,
          "ffn_dim_multiplier": 1.5, "vocab_size": 128256, "rope_theta": 500000.0,
          "use_scaled_rope": True}),
    ],
)  # fmt: skip
def test_params_json_gives_the_preset(name, params):
    ours = from_params({"norm_eps": 1e-5, **params}, name, vocab_size=32000)
    expected = preset(name)
    for field in ("dim", "num_layers", "num_kv_heads", "ffn_dim", "vocab_size", "max_position",
                  "rope_theta", "rope_scaling", "norm_eps"):  # fmt: skip
        assert getattr(ours, field) == getattr(expected, field), field


def test_layers_of_a_kind_are_found_and_picked():
    theirs = FAMILIES["gemma-2"]
    config = from_hugging_face({"model_type": "gemma2", **theirs.to_dict()}, "gemma-2")
    assert [spec.window for spec in config.layers] == [8, None, 8]
    assert config.kinds_of_layers() == [[0, 2], [1]]
    assert config.picked([1, 1, 0]).layers == tuple(config.layers[i] for i in (1, 1, 0))
    assert config.one_of_each_kind().layers == config.layers[:2]
    sparse = FAMILIES["qwen-3-moe-dense"]  # its last layer has no experts
    config = from_hugging_face({"model_type": "qwen3_moe", **sparse.to_dict()}, "sparse")
    assert config.kinds_of_layers() == [[0, 1], [2]]
    assert config.picked([2, 0]).mixture.dense_layers == (0,)


GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OTHER_WORDS = {  # a family, its fields, and keys of config.json that say it otherwise
    "yarn with a note": ("llama", {}, {"rope_scaling": YARN | {"finetuned": True}}),
    "yarn with mscale 0": ("llama", {}, {
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0}}),
    "llama3 of the whole context": ("llama", {}, {"rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    "swish": ("llama", {}, {"hidden_act": "swish"}),
    "an activation that Gemma does not read": ("gemma2", GEMMA, {"hidden_act": "gelu"}),
    "every second layer": ("gemma3_text", GEMMA, {"layer_types": None,
                                                   "sliding_window_pattern": 2}),
    "every fourth layer": ("smollm3", {"num_hidden_layers": 5}, {"no_rope_layers": None}),
    "every third layer": ("smollm3", {"num_hidden_layers": 5},
                          {"no_rope_layers": None, "no_rope_layer_interval": 3}),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_WORDS)
def test_other_words_mean_what_they_mean_to_transformers(case, tmp_path):
    family, fields, words = OTHER_WORDS[case]
    hugging_face.drawn(hugging_face.config(family, **fields)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    if "rope_scaling" in words:
        del config["rope_parameters"]
    config |= words
    for key in [key for key in words if words[key] is None]:
        del config[key]
    file.write_text(json.dumps(config))
    expected = hugging_face.read_by_transformers(tmp_path)(hugging_face.TOKENS).logits
    hugging_face.assert_near(load_model(str(tmp_path))(hugging_face.TOKENS), expected)
