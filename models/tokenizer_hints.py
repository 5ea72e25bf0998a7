"""The files beside a tokenizer: its configuration, added tokens, end tokens, a chat template.

hints = Hints.of(folder, {"tokenizer_config.json": b"…"})       # files by their names
hints.bos_token, hints.eos_ids, hints.chat_template
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantbench import files
from quantbench.errors import CheckpointError
from quantbench.models.config_checks import TRUTH
from quantbench.text import shown
from quantbench.typed_json import from_json, parsed

if TYPE_CHECKING:
    from quantbench.models.tokenizer import Tokenizer

MERGES = "merges.txt"  # needed with vocab.json
_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_ADDED, _NAMES = "added_tokens.json", "special_tokens_map.json"
BESIDE = (MERGES, _CONFIG, _ADDED, _NAMES, "generation_config.json", _TEMPLATE)
_ENDS = ("generation_config.json", "config.json")  # have the ids that end a generation
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True)
class Added:
    """A token that is cut out of a text before the rest is encoded."""

    content: str
    special: bool = False
    # Whether it takes white space before and after it along, and is no part of a longer word.
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False  # whether it is looked for in normalized text


@dataclass(frozen=True)
class Hints:
    """What a checkpoint's other files say about its tokenizer."""

    bos_token: str | None
    add_bos: bool | None  # None: not said
    opens: bool | None  # whether BOS opens a text, beyond what tokenizer.json says; None: as there
    eos_token: str | None
    eos_ids: frozenset[int]
    chat_template: str | None  # in Jinja; None: there is none
    named: Mapping[str, str | None]  # those of NAMED that the files have
    added: Mapping[int, Added]  # tokens that were added to the vocabulary, by id
    special: tuple[str, ...]  # tokens that the files call special
    kind: str | None  # in models/tokenizer_classes.py; "": no such class; None: no configuration
    prefix: bool | None  # whether a space is put in front of a text; None: as the vocabulary says
    legacy: bool | None  # whether also behind each added token, as transformers did until 2023
    splits: bool  # whether special tokens in a text are never such

    def names_of(self, tokenizer: "Tokenizer") -> dict[str, str]:
        """Special tokens by the names of NAMED: the file's own words, or, where it has neither a
        beginning nor an end, those of the ids; for the file's own template its words alone."""
        own = {**tokenizer.named, **self.named}
        if not self.chat_template and own.keys().isdisjoint(("bos_token", "eos_token")):
            pieces = {id: piece for piece, id in tokenizer.special.items()}
            ends = [pieces[id] for id in sorted(tokenizer.eos_ids) if id in pieces]
            bos = None if tokenizer.bos_id is None else pieces.get(tokenizer.bos_id)
            own = {"bos_token": bos, "eos_token": next(iter(ends), None), **own}
        return {name: piece for name, piece in own.items() if piece is not None}

    @classmethod
    def of(cls, folder: Path, content: Mapping[str, bytes]) -> "Hints":
        """From those of four files that there are. Raises CheckpointError for a bad one."""
        file = folder / _CONFIG
        tokenizer, ids = read_object(folder, content, _CONFIG), set[int]()
        if (add_bos := tokenizer.get("add_bos_token")) is not None:
            TRUTH.check(file, "add_bos_token", add_bos)
        kind, defaults, opens = None, dict[str, str | None](), None
        if _CONFIG in content or not any(name.endswith("tokenizer.model") for name in content):
            from quantbench.models.tokenizer_classes import rules_of

            kind, defaults, opens = rules_of(folder, content, tokenizer)
        for name in _ENDS:
            value = read_object(folder, content, name).get("eos_token_id")
            listed = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(id) is int for id in listed):
                raise CheckpointError(
                    f"{folder / name}: eos_token_id is {shown(value)}, not an id or a list of ids"
                )
            ids.update(listed)
        decoder, of_map = tokenizer.get("added_tokens_decoder"), dict[str, Any]()
        if decoder is None:  # as older versions of transformers wrote it
            of_map = read_object(folder, content, _NAMES)
        names, where = {**tokenizer, **of_map}, folder / _NAMES
        named = {
            key: _text(where if key in of_map else file, key, names.get(key, defaults.get(key)))
            for key in dict.fromkeys((*NAMED, *defaults))
            if key in names or key in defaults
        }
        for key in ("extra_special_tokens", "model_specific_special_tokens"):  # names of a model
            if isinstance(names.get(key), dict):
                named |= {name: _text(file, key, token) for name, token in names[key].items()}
        lists = [names.get(f"{kind}_special_tokens") for kind in ("additional", "extra")]
        listed = [token for tokens in lists if isinstance(tokens, list) for token in tokens]
        special = [_text(file, "additional_special_tokens", token) for token in listed]
        special = [text for text in (*named.values(), *special) if text]
        template = tokenizer.get("chat_template")
        if _TEMPLATE in content:
            template = content[_TEMPLATE].decode("utf-8", "replace")
        elif isinstance(template, list):  # several, by name
            items = [item for item in template if isinstance(item, dict)]
            template = next((i.get("template") for i in items if i.get("name") == "default"), None)
        return cls(
            named.get("bos_token"),
            add_bos,
            opens,
            named.get("eos_token"),
            frozenset(ids),
            _text(file, "chat_template", template),
            named,
            _added(folder, content, decoder, special),
            tuple(special),
            kind,
            tokenizer.get("add_prefix_space"),
            tokenizer.get("legacy"),
            bool(tokenizer.get("split_special_tokens")),
        )


def _added(
    folder: Path, content: Mapping[str, bytes], decoder: Any, special: Collection[str]
) -> dict[int, Added]:
    """The tokens of added_tokens_decoder; where that is None, those of added_tokens.json. special:
    those that are, whatever the files say of each."""
    where = f"{folder / _CONFIG}: added_tokens_decoder"
    if decoder is None:
        where, tokens = f"{folder / _ADDED}", read_object(folder, content, _ADDED)
        decoder = {
            id: {"content": text, "normalized": text not in special} for text, id in tokens.items()
        }
    added = {}
    try:
        for id, token in decoder.items():
            if not (str(id).isdecimal() and len(str(id)) < 10):
                raise ValueError(f"its id {shown(id)} is no whole number")
            parsed_token = from_json(Added, token)
            added[int(id)] = dataclasses.replace(
                parsed_token, special=parsed_token.special or parsed_token.content in special
            )
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{where} is no object of ids and tokens: {error}") from None
    return {id: token for id, token in added.items() if token.content}


def _text(file: Path, key: str, token: Any) -> str | None:
    """A special token's text: written plainly, or as an object with its flags."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise CheckpointError(
            f"{file}: {key} is {shown(token)}; accepted is a text, or an object with its content"
        )
    return text


def read_object(folder: Path, content: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = parsed(content.get(name, "{}"))
    except ValueError as error:
        raise CheckpointError(files.refusal("cannot read", folder / name, error)) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{folder / name} holds a {type(value).__name__}, not a JSON object")
    return value
