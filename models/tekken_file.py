"""Mistral's tekken.json: byte strings and their merge ranks, a pattern, special tokens in front.

An id below default_num_special_tokens is a special token's; others are a rank and that number.
Ranks beyond default_vocab_size are left out (https://github.com/mistralai/mistral-common).
"""

import base64
import json
from pathlib import Path
from typing import Any

from quantbench.errors import CheckpointError
from quantbench.models.tiktoken_file import cuts
from quantbench.models.tokenizer import Tokenizer
from quantbench.models.tokenizer_hints import Hints

# Of files that do not list them, which are those of 2024.
SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip


class TekkenTokenizer(Tokenizer):
    """Mistral's, of 2024 and later, if the folder has no tokenizer.json."""

    def __init__(self, path: Path, data: bytes, hints: Hints) -> None:
        from tiktoken import Encoding

        try:
            described = json.loads(data)
            config: dict[str, Any] = described["config"]
            self._first = int(config["default_num_special_tokens"])
            self.size = int(config["default_vocab_size"])
            words = described["vocab"][: self.size - self._first]
            ranks = {base64.b64decode(word["token_bytes"]): word["rank"] for word in words}
            listed = described.get("special_tokens")
            names = {t["token_str"]: t["rank"] for t in listed} if listed else {}
            self._model = Encoding(
                "tekken",
                pat_str=config["pattern"],
                mergeable_ranks=ranks,
                special_tokens={},
            )
            if sorted(ranks.values()) != list(range(self.size - self._first)):
                raise ValueError("its ranks are not 0, 1, 2 and so on")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is no tokenizer of Mistral's: {error}; copy or download it again"
            ) from None
        self.special = names or {name: id for id, name in enumerate(SPECIAL)}
        self.bos_id = self._find_bos(hints, self.special.get("<s>"))
        self.eos_ids = self._endings(hints)

    def _encode(self, text: str) -> list[int]:
        return [id + self._first for part in cuts(text) for id in self._model.encode_ordinary(part)]

    def _decode(self, ids: list[int]) -> str:
        ordinary = [id - self._first for id in ids if id >= self._first]
        return self._model.decode(ordinary, errors="replace")
