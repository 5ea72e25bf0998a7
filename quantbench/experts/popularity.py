"""How often each expert of each layer is chosen: counted over a text, kept as JSON.

    popularity = Popularity.load("--expert_placement", path)
    popularity.counts[layer][expert]            # assignments; () for a layer without experts
    popularity.of_model(routers, "--expert_placement", path)    # or UsageError, of another model

The file holds the counts of the text's two halves. A placement by the counts of one half can be
tried on the other, so that it is judged by text that it has not seen.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantbench import files
from quantbench.errors import UsageError
from quantbench.text import counted
from quantbench.typed_json import from_json, to_json

Counts = tuple[tuple[int, ...], ...]  # assignments by layer and expert; () for a dense layer
FORMAT = 1  # of the file


@dataclass(frozen=True)
class Routers:
    """What tells one model's routing from another's: the shape, and a digest of each router.

    A digest is of the signs of a router's weights, which no change of dtype alters
    (experts/routing.py computes it). It is "" for a layer without experts, and for a model whose
    weights have not been read.
    """

    model: str  # its name, for messages
    num_experts: int  # of each layer that has any
    experts_per_token: int
    dense_layers: tuple[int, ...]  # layers without experts
    digests: tuple[str, ...]  # by layer

    @property
    def experts(self) -> tuple[int, ...]:
        """How many experts each layer has; 0 for a dense layer."""
        dense = set(self.dense_layers)
        return tuple(
            0 if layer in dense else self.num_experts for layer in range(len(self.digests))
        )

    def first(self, layers: int) -> "Routers":
        """Those of the model's first layers, as --num_layers takes them."""
        dense = tuple(layer for layer in self.dense_layers if layer < layers)
        return replace(self, dense_layers=dense, digests=self.digests[:layers])

    def difference(self, other: "Routers") -> str | None:
        """Why counts over these routers do not apply to `other`; None if they do.

        Words that end before the other model's name: "3 layers, not 5 as in".
        """
        layers = len(other.digests)
        if len(self.digests) < layers:
            return f"{counted(len(self.digests), 'layer')}, not {layers} as in"
        if self.num_experts != other.num_experts:
            return f"{self.num_experts} experts a layer, not {other.num_experts} as in"
        if self.experts_per_token != other.experts_per_token:
            return f"{self.experts_per_token} experts a token, not {other.experts_per_token} as in"
        if self.first(layers).dense_layers != other.dense_layers:
            return "other layers without experts than"
        digests = zip(self.digests[:layers], other.digests, strict=True)
        for layer, (mine, theirs) in enumerate(digests):
            if mine and theirs and mine != theirs:
                return f"another router in layer {layer} than"
        return None


@dataclass(frozen=True)
class Popularity:
    """Assignments of tokens to experts, counted over a text."""

    routers: Routers
    text: str  # the name of the text
    tokens: int
    halves: tuple[Counts, Counts]  # over the text's first and second half
    format: int = FORMAT

    @property
    def counts(self) -> Counts:
        """Over the whole text."""
        return added(*self.halves)

    def of_model(self, routers: Routers, option: str, path: str) -> "Popularity":
        """The counts of a model's layers. Raises UsageError, one line, for another model's counts.

        A model with fewer layers of the same routers (--num_layers) gets the counts of those.
        option, path: what was given, for the message.
        """
        difference = self.routers.difference(routers)
        if difference:
            raise UsageError(
                f"{option} {path} is of another model: {self.routers.model} has {difference} "
                f"{routers.model}; write one with quantbench experts profile"
            )
        layers = len(routers.digests)
        first, second = (half[:layers] for half in self.halves)
        return replace(self, routers=routers, halves=(first, second))

    def save(self, option: str, path: str | Path) -> None:
        """Raises LogError, one line, if the file cannot be written."""
        files.write_text(option, path, json.dumps(to_json(self)) + "\n")

    @staticmethod
    def load(option: str, path: str | Path) -> "Popularity":
        """Raises UsageError, one line, for a file that `quantbench experts profile` did not write.

        option: the option that names the file, for the message.
        """
        return Popularity.read(option, path, files.read_json(option, path, UsageError, AGAIN))

    @staticmethod
    def read(option: str, path: str | Path, value: object) -> "Popularity":
        """The popularity in a file's JSON. Raises UsageError, one line."""
        try:
            return _checked(value)
        except ValueError as error:
            why = f"it holds no popularity of experts: {error}"
            raise UsageError(files.refusal(option, path, why, AGAIN)) from None


AGAIN = "write it anew with quantbench experts profile"


def _checked(value: object) -> Popularity:
    if not isinstance(value, dict) or "halves" not in value:
        raise ValueError("it holds no counts")
    if value.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    popularity = from_json(Popularity, value)
    _check(popularity)
    return popularity


def _check(popularity: Popularity) -> None:
    """Raise ValueError for counts that no text can give."""
    routers = popularity.routers
    if not 1 <= routers.experts_per_token <= routers.num_experts:
        raise ValueError(
            f"{routers.experts_per_token} of {routers.num_experts} experts per token is impossible"
        )
    for half in popularity.halves:
        if len(half) != len(routers.digests):
            raise ValueError(f"counts of {len(half)} layers, and routers of {len(routers.digests)}")
        for layer, (counts, experts) in enumerate(zip(half, routers.experts, strict=True)):
            if len(counts) != experts:
                raise ValueError(f"layer {layer} has {len(counts)} counts for {experts} experts")
            if any(count < 0 for count in counts):
                raise ValueError(f"layer {layer} has a count below 0")
    expected = popularity.tokens * routers.experts_per_token
    for layer, counts in enumerate(popularity.counts):
        if counts and sum(counts) != expected:
            raise ValueError(
                f"layer {layer} counts {sum(counts)} assignments, where {popularity.tokens} tokens "
                f"give {expected}"
            )


# ---------------------------------------------------------------------------------- counts


def added(first: Counts, second: Counts) -> Counts:
    """The sum, expert by expert."""
    return tuple(
        tuple(a + b for a, b in zip(*layer, strict=True))
        for layer in zip(first, second, strict=True)
    )


def effective_experts(counts: Sequence[int]) -> float:
    """How many experts, chosen evenly, would be as varied: exp of the entropy of the shares.

    From 1, where one expert takes all, to the number of experts. 0 without assignments.
    """
    total = sum(counts)
    shares = [count / total for count in counts if count]
    return math.exp(-sum(share * math.log(share) for share in shares)) if shares else 0.0
