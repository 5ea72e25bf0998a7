"""Small models of every listed family and vocabularies of every kind through llama.cpp's own
converter: logits, ids, texts and chat prompts are transformers'."""

import json

import pytest
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import quantbench.models
from quantbench.errors import CheckpointError
from quantbench.models.chat import chat_of
from quantbench.models.formats import open_checkpoint
from quantbench.models.loading import load_model
from quantbench.models.registry import ARCHITECTURES
from quantbench.quantize.kernel import KernelLinear
from tests.models import test_families
from tests.models.converter import NEEDED, convert
from tests.models.hugging_face import FAMILIES, OF_STATES, assert_near, edit_config, rewritten
from tests.models.test_quantized import folder_of
from tests.models.test_tokenizer import HARD_TEXTS
from tests.models.tiny_tokenizers import CORPUS, llama_2_json, sentencepiece_model

pytestmark = NEEDED
VOCABULARY = 480  # tokens of each vocabulary here
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|observation|>", "[gMASK]")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m.role + '] ' + m.content + eos_token }}"
    "{% endfor %}{% if tools is none %}{{ '[assistant]' }}{% endif %}"
)
NO_WINDOW = {"sliding_window": None}
# What the converter does not write is not drawn: windows of Llama, Mistral and Qwen, dynamic
# scaling, gpt-oss' bounds, Gemma's scale of scores, layers without experts, LFM2's biases.
CHANGES = {
    "mistral-0.1": NO_WINDOW,
    "gpt_oss": {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    "qwen3-next": {"mlp_only_layers": []},
    "lfm2": {"conv_bias": False},
    "lfm2 experts": {"routed_scaling_factor": 1.0},
    "llama yarn": {
        "rope_parameters": test_families.YARN
        | {"attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 2.0, "rope_theta": 1e4}
    },
    **{name: {"query_pre_attn_scalar": 32, "head_dim": 32} for name in ("gemma-2", "gemma2")},
    "gemma3": {"query_pre_attn_scalar": 32, "head_dim": 32},
}
NOT_WRITTEN = {"qwen-2-windows", "qwen-2-moe", "qwen-3-moe-dense", "llama dynamic",
               "granite4 unrotated", "lfm2 no bias"}  # fmt: skip
FAMILIES_WRITTEN = sorted({*FAMILIES, *test_families.ROWS} - NOT_WRITTEN)
WITHOUT_CONVERTER = {"muse_glimmer_text"}  # model_types that it does not know
KINDS_OF_VOCABULARY = {  # by the beginning of a family's name; the others are gpt-2's
    "gemma4": "gemma",
    **dict.fromkeys(("gemma", "llama-2", "mistral", "phi3", "phi-3"), "sentencepiece"),
    **dict.fromkeys(("llama-3", "lfm2"), "llama-bpe"),
    **dict.fromkeys(("qwen3.5", "qwen3-next"), "qwen35"),
    "qwen": "qwen2",
    **dict.fromkeys(("gpt_oss", "phi4"), "gpt-4o"),
}


def vocabulary_of(family):
    return next(
        (kind for start, kind in KINDS_OF_VOCABULARY.items() if family.startswith(start)), "gpt-2"
    )


def of_tiktoken(name):
    """The pattern of an encoding in OpenAI's library, without its vocabulary."""
    import tiktoken_ext.openai_public as public

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: {})
        return getattr(public, name)()["pat_str"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """transformers' tokenizer of a kind, and a folder with its files."""
    folder, made = tmp_path_factory.mktemp("vocabularies"), {}
    lines = [*CORPUS, *HARD_TEXTS]

    def bytes_(pattern=None, whole=False):
        from tokenizers.trainers import BpeTrainer

        tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
        cuts = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
        if pattern:
            cuts.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = BpeTrainer(
            vocab_size=VOCABULARY - len(SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(lines, trainer)
        return tokenizer

    def of_class(kind):
        model = json.loads(bytes_().to_str())["model"]
        return kind(vocab=model["vocab"], merges=[*map(tuple, model["merges"])])

    def of_gemma():
        model = llama_2_json(sentencepiece_model(dummy_prefix=False))["model"]
        names = {"<s>": "<bos>", "</s>": "<eos>"}
        vocabulary = {names.get(piece, piece): id for piece, id in model["vocab"].items()}
        kind = transformers.GemmaTokenizer
        tokenizer = kind(vocabulary, [*map(tuple, model["merges"])], mask_token="<unk>",
                         pad_token="<unk>")  # fmt: skip
        tokenizer.add_tokens([AddedToken("and the", normalized=False)])  # which no merge makes
        return tokenizer

    def get(kind):
        if kind in made:
            return made[kind]
        path, opens = folder / kind, True
        if kind == "sentencepiece":
            path.mkdir()
            (path / "tokenizer.model").write_bytes(sentencepiece_model())
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        elif kind == "gemma":
            tokenizer = of_gemma()
        elif kind in ("qwen2", "qwen35"):
            classes = {"qwen2": "Qwen2Tokenizer", "qwen35": "Qwen3_5Tokenizer"}
            tokenizer, opens = of_class(getattr(transformers, classes[kind])), False
        else:
            patterns = {"llama-bpe": "cl100k_base", "gpt-4o": "o200k_base"}
            pattern = of_tiktoken(patterns[kind]) if kind in patterns else None
            if kind == "llama-bpe":
                from transformers.convert_slow_tokenizer import TikTokenConverter

                pattern = TikTokenConverter().pattern
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_(pattern, bool(pattern)))
            opens = False
        if not opens:
            tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL[1:]]})
            tokenizer.add_special_tokens({"eos_token": SPECIAL[0]})
        tokenizer.chat_template = TURNS if opens else CHATML
        tokenizer.save_pretrained(path)
        made[kind] = tokenizer, path
        return made[kind]

    return get


@pytest.fixture(scope="module")
def converted(tokenizers, tmp_path_factory):
    """A family's folder, its file, and transformers' model."""
    made = {}

    def get(family):
        if family in made:
            return made[family]
        folder = tmp_path_factory.mktemp("converted")
        kind = vocabulary_of(family)
        tokenizer, vocabulary = tokenizers(kind)
        theirs = test_families.made(family, vocab_size=len(tokenizer), **CHANGES.get(family, {}))
        theirs.save_pretrained(folder / "model")
        for file in vocabulary.iterdir():
            (folder / "model" / file.name).write_bytes(file.read_bytes())
        as_published(folder / "model", family)
        if family.startswith("phi4"):
            name = folder / "model" / "tokenizer_config.json"
            words = json.loads(name.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}
            name.write_text(json.dumps(words))
        options = ["--outtype", "f32"]
        if family.startswith(("qwen3.5", "qwen3-next")):
            options += ["--no-mtp"]
        pre = "" if kind in ("sentencepiece", "gemma") else kind
        file = convert(folder / "model", folder / "model.gguf", *options, pre=pre)
        made[family] = folder / "model", file, theirs
        return made[family]

    return get


def as_published(folder, family):
    """config.json in the words of published models, where transformers 5 writes others."""
    if family.startswith("gemma4"):
        config = json.loads((folder / "config.json").read_text())
        wide = next(iter(config.pop("per_layer_config").values()))
        (folder / "config.json").write_text(json.dumps(config))
        heads = wide.get("num_key_value_heads")
        edit_config(folder, global_head_dim=wide["head_dim"], num_global_key_value_heads=heads)
    if family.startswith("granite4"):
        edit_config(folder, layer_types=["attention"] * 2, num_experts_per_tok=0)


def test_every_listed_family_is_tried():
    kinds = {
        FAMILIES[name].model_type if name in FAMILIES else test_families.ROWS[name][0]
        for name in FAMILIES_WRITTEN
    }
    assert kinds | WITHOUT_CONVERTER | {"qwen2_moe"} == {*ARCHITECTURES}


@pytest.mark.parametrize("family", FAMILIES_WRITTEN)
def test_logits_are_transformers(family, converted):
    folder, file, theirs = converted(family)
    ours = load_model(str(file))
    tokens = torch.randint(96, (2, 30))
    share = OF_STATES if ours.config.recurrent else 1e-4
    assert_near(ours(tokens), theirs(tokens).logits, share)


@pytest.mark.parametrize(
    "family", ["llama-2", "llama-3.1", "qwen-2", "qwen3.5", "gpt_oss", "gemma4 equal", "olmo2"]
)
def test_ids_texts_and_prompts_are_transformers(family, converted, tokenizers):
    folder, file, _ = converted(family)
    theirs, _ = tokenizers(vocabulary_of(family))
    texts = [*HARD_TEXTS, "and the and the\u0301", "x" * 50 + "\n" * 40 + " " * 40, "I'LL DON'T"]
    for path in (folder, file):
        tokenizer = open_checkpoint(str(path)).tokenizer(len(theirs))
        for text in texts:
            ids = theirs.encode(text, add_special_tokens=False)
            assert tokenizer.encode_marked(text) == ids, (path.name, text)
            assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        expected = theirs.apply_chat_template(
            [{"role": "user", "content": "What is it?"}],
            add_generation_prompt=True,
            return_dict=False,
        )
        assert chat_of(tokenizer, "m").ask("What is it?")[0] == expected, path.name


def test_quantized_files_of_models_with_states_are_as_their_floats(converted):
    folder, _, _ = converted("qwen3.5")
    file = convert(folder, folder / "q8.gguf", "--outtype", "q8_0", "--no-mtp", pre="qwen35")
    as_is, floats = (quantbench.models.load(str(file), quantization=q) for q in (None, "none"))
    assert any(isinstance(part, KernelLinear) for part in as_is.layers[0].modules())
    tokens = torch.randint(96, (2, 30))
    assert_near(as_is(tokens), floats(tokens), OF_STATES)


def test_nvfp4_has_its_factors_beside_it(tokenizers, tmp_path, monkeypatch):
    """As ModelOpt writes it, of which the converter makes tensors `scale`."""
    # The converter takes rows of 64.
    described = FAMILIES["qwen-3"].to_dict() | {"intermediate_size": 128, "vocab_size": 500}
    monkeypatch.setitem(FAMILIES, "qwen-3", transformers.Qwen3Config(**described))
    folder = folder_of("modelopt nvfp4", tmp_path / "model", family="qwen-3")
    tokenizer, files = tokenizers("qwen2")
    for file in files.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    file = convert(folder, tmp_path / "m.gguf", "--outtype", "f32", pre="qwen2")
    tokens = torch.randint(96, (2, 30))
    assert any(name.endswith(".scale") for name in open_checkpoint(str(file)).blocks)
    for quantization in (None, "none"):
        ours, theirs = (
            quantbench.models.load(str(path), quantization=quantization) for path in (file, folder)
        )
        assert_near(ours(tokens), theirs(tokens), OF_STATES)


def test_layers_that_draft_tokens_are_left_out(converted, tmp_path):
    folder, _, theirs = converted("qwen3.5")
    edit_config(folder, mtp_num_hidden_layers=1)
    with rewritten(folder) as tensors:
        width = theirs.config.hidden_size
        tensors["mtp.norm.weight"] = torch.ones(width)
        tensors["mtp.layers.0.input_layernorm.weight"] = torch.ones(width)
    file = convert(folder, tmp_path / "mtp.gguf", "--outtype", "f32", pre="qwen35")
    tokens = torch.randint(96, (2, 30))
    assert_near(load_model(str(file))(tokens), theirs(tokens).logits, OF_STATES)


def test_a_file_that_lacks_what_a_layer_needs_says_what(converted, tmp_path):
    """Metadata that changes the result and is not understood is named."""
    data = converted("qwen3.5")[1].read_bytes()
    file = tmp_path / "model.gguf"
    file.write_bytes(data.replace(b"qwen35.ssm.group_count", b"qwen35.ssm.group_caunt"))
    with pytest.raises(CheckpointError, match="metadata 'qwen35.ssm.group_caunt' is not under"):
        load_model(str(file))
