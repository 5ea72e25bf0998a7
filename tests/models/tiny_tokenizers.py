"""Small tokenizers of every kind, built for the tests in this folder."""

import base64
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from quantbench.models.tiktoken_file import llama_3_special_tokens

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then the dog sleeps.",
    "Hello there! How are you? I am fine, thank you; and you?",
    "def add(first, second):\n    return first + second  # the sum of both",
    "user asks, the assistant answers: what is the answer to the question?",
    "[INST] What is it? [/INST] <<SYS>> You are brief. <</SYS>>",
    "naïve café, größer, 東京 日本語, 12345 and 67890",
] * 20

# Merges in rank order, as a tiktoken file has them: each is two earlier byte strings in a row.
MERGES = (
    "th", "he", "the", " t", " the", "in", "ing", "an", "and", " a", " and", "er", "ll", "ello",
    "lo", "llo", "ello", "Hello", "  ", "    ", "\n\n", "us", "user", "12", "123", " W", "or", "ld",
    "orld", " World", "é", "...", "..", "45", "67", "4567",
)  # fmt: skip


def sentencepiece_model(control: tuple[str, ...] = (), dummy_prefix: bool = True) -> bytes:
    """A BPE model with Llama 2's settings: bytes as a fallback, spaces kept, <s> and </s>."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=480,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=dummy_prefix,
        split_digits=True,
        control_symbols=list(control),
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def tiktoken_ranks() -> dict[bytes, int]:
    """256 single bytes, in no special order, and then MERGES that two earlier ones make up."""
    ranks = {bytes([(byte * 7 + 3) % 256]): byte for byte in range(256)}
    for merge in MERGES:
        whole = merge.encode()
        halves = ((whole[:cut], whole[cut:]) for cut in range(1, len(whole)))
        if whole not in ranks and any(a in ranks and b in ranks for a, b in halves):
            ranks[whole] = len(ranks)
    return ranks


def tiktoken_file() -> bytes:
    ranks = tiktoken_ranks().items()
    return b"".join(base64.b64encode(piece) + b" %d\n" % rank for piece, rank in ranks)


def llama_2_json(model: bytes) -> dict:
    """The sentencepiece model as Llama 2's tokenizer.json writes it."""
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    sp = SentencePieceProcessor(model_proto=model)
    pieces = [sp.id_to_piece(id) for id in range(sp.vocab_size())]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    special = [piece for id, piece in enumerate(pieces) if sp.is_control(id) or sp.is_unknown(id)]
    merges = []  # a piece's rank is its id, so merges come in the order of what they make
    for id, piece in enumerate(pieces):
        if piece not in special and not sp.is_byte(id):
            pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
            merges += [(a, b) for a, b in pairs if a in vocabulary and b in vocabulary]
    bpe = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    made = Tokenizer(models.BPE(vocabulary, merges, **bpe))
    made.add_special_tokens(special)
    normalized = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(normalized)
    made.post_processor = processors.TemplateProcessing("<s> $A", "$A $B:1", [("<s>", 1)])
    decoded = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*decoded, decoders.Strip(" ", left=1)])
    return json.loads(made.to_str())


def hugging_face_llama(description: dict, **options: Any) -> Any:
    """Their class, with its own normalization, template and decoder, on our pieces and merges."""
    from transformers import LlamaTokenizer

    model = description["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return LlamaTokenizer(vocab=model["vocab"], merges=merges, **options)


def llama_3_json() -> str:
    """The tiktoken file as Hugging Face converts it, with Hugging Face's idea of the split."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    special = list(llama_3_special_tokens(0))
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(tiktoken_file())
        return TikTokenConverter(file.name, extra_special_tokens=special).converted().to_str()


def write_folder(folder: Path, files: dict[str, bytes | str | dict]) -> Path:
    """Write bytes as they are, text as UTF-8, anything else as JSON; gives back the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            text = content if isinstance(content, str) else json.dumps(content)
            path.write_text(text, encoding="utf-8")
    return folder
