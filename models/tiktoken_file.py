"""Llama 3's tokenizer.model: lines of a byte string in base64, a space and its merge rank."""

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path

from quantbench.errors import CheckpointError
from quantbench.models.tokenizer import LLAMA_3_BEGINNING, TIKTOKEN_LINE, Tokenizer
from quantbench.models.tokenizer_hints import Hints

# How Llama 3 cuts a text into words before it merges bytes: English contractions, letters and one
# character before them, up to three digits, punctuation and a space before it, line ends, blanks.
LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Llama 3's 256 special tokens by their place after the ordinary ones. Llama 3.1 gave names to
# three that Llama 3 had reserved (4, 8 and 10) and left all others where they were.
LLAMA_3_SPECIAL = {
    0: LLAMA_3_BEGINNING,
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
LONGEST_CUT = 20_000  # characters; tiktoken's regex engine overflows somewhere above 400,000


class TiktokenTokenizer(Tokenizer):
    """Llama 3 as Meta publishes it: a file of byte strings and their merge ranks.

    A rank is also the id, and the 256 special tokens come after the last one.
    """

    def __init__(self, path: Path, data: bytes, hints: Hints) -> None:
        from tiktoken import Encoding

        ranks = _read_ranks(path, data)
        self._ordinary = len(ranks)
        self.special = llama_3_special_tokens(len(ranks))
        self._model = Encoding(
            "llama-3", pat_str=LLAMA_3_SPLIT, mergeable_ranks=ranks, special_tokens={}
        )
        self.size = len(ranks) + len(self.special)
        self.bos_id = self._find_bos(hints, self.special[LLAMA_3_BEGINNING])
        self.eos_ids = self._endings(hints)

    def _encode(self, text: str) -> list[int]:
        return [id for part in cuts(text) for id in self._model.encode_ordinary(part)]

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode([id for id in ids if id < self._ordinary], errors="replace")


def llama_3_special_tokens(base: int) -> dict[str, int]:
    """The ids of Llama 3.1's 256 special tokens when `base` ordinary ones come before them."""
    reserved = (f"<|reserved_special_token_{number}|>" for number in range(256))
    return {LLAMA_3_SPECIAL.get(place) or next(reserved): base + place for place in range(256)}


def cuts(text: str, longest: int = LONGEST_CUT) -> Iterator[str]:
    """Parts of `text` of at most `longest` characters that encode one by one as the whole would.

    LLAMA_3_SPLIT always begins a word at a space that follows something not blank, so that is
    where we cut. Only a run of `longest` characters without such a place is cut as it falls.
    """
    start = 0
    while len(text) - start > longest:
        end = text.rfind(" ", start + 1, start + longest)
        while end > 0 and text[end - 1].isspace():
            end = text.rfind(" ", start + 1, end)
        if end < 0:
            end = start + longest
        yield text[start:end]
        start = end
    yield text[start:]


def _read_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    """Every line's byte string and rank, lowest rank first."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        match = TIKTOKEN_LINE.fullmatch(line)
        try:
            if match is None:
                raise binascii.Error
            ranks[base64.b64decode(match[1], validate=True)] = int(match[2])
        except ValueError as error:  # no base64, or more digits than Python reads
            raise CheckpointError(
                f"{path} line {number} is not a base64 string, a space and a rank;"
                " copy or download the file again"
            ) from error
    ranks = dict(sorted(ranks.items(), key=lambda item: item[1]))
    every_byte = all(bytes([byte]) in ranks for byte in range(256))
    if list(ranks.values()) != list(range(len(data.splitlines()))) or not every_byte:
        raise CheckpointError(
            f"{path} lacks ranks, repeats some or lacks one of the 256 single bytes;"
            " copy or download the file again"
        )
    return ranks
