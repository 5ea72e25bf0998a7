"""How often each expert of each layer is chosen: counted over a text, stored as JSON.

    popularity = Popularity.load("--expert_placement", path)
    popularity.counts[layer][expert]            # assignments; () for a layer without experts
    popularity.of_model(routers, "--expert_placement", path)    # or UsageError, of another model
    keep(popularity); find(routers, option)     # in the cache folder

The file holds the counts of the text's two halves. A placement by the counts of one half can be
tried on the other, so that it is judged by text that it has not seen.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantbench import files
from quantbench.errors import LogError, UsageError
from quantbench.text import counted
from quantbench.typed_json import from_json, to_json

Counts = tuple[tuple[int, ...], ...]  # assignments by layer and expert; () for a dense layer
FORMAT = 1  # of the file
AGAIN = "write it anew with quantbench experts profile"
FLAT = 0.05  # of a layer, if its more popular half serves less than this above its even share


@dataclass(frozen=True)
class Routers:
    """What distinguishes one model's routing from another's: shape, and a digest of each router
    (experts/routing.py); "" for a layer without experts, and for weights that were not read."""

    model: str  # its name, for messages
    num_experts: int  # of each layer that has any
    experts_per_token: int
    dense_layers: tuple[int, ...]  # layers without experts
    digests: tuple[str, ...]  # by layer

    @property
    def experts(self) -> tuple[int, ...]:
        """How many experts each layer has; 0 for a dense layer."""
        layers = range(len(self.digests))
        return tuple(0 if i in self.dense_layers else self.num_experts for i in layers)

    def difference(self, model: "Routers") -> str | None:
        """Why counts over these routers do not apply to `model`, of at most as many layers; None if
        they do. Words that end before the other model's name: "3 layers, not 5 as in"."""
        layers = len(model.digests)
        if len(self.digests) < layers:
            return f"{counted(len(self.digests), 'layer')}, not {layers} as in"
        if self.num_experts != model.num_experts:
            return f"{self.num_experts} experts a layer, not {model.num_experts} as in"
        if self.experts_per_token != model.experts_per_token:
            return f"{self.experts_per_token} experts a token, not {model.experts_per_token} as in"
        if self.experts[:layers] != model.experts:
            return "other layers without experts than"
        for layer, pair in enumerate(zip(self.digests, model.digests, strict=False)):
            if all(pair) and pair[0] != pair[1]:
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
        layers = zip(*self.halves, strict=True)
        return tuple(tuple(map(sum, zip(*layer, strict=True))) for layer in layers)

    def of_model(self, routers: Routers, option: str, path: str | Path) -> "Popularity":
        """The counts of a model's layers, which may be fewer (--num_layers). Raises UsageError, one
        line with the option and path that the user gave, for another model's counts."""
        if difference := self.routers.difference(routers):
            raise UsageError(
                f"{option} {path} is of another model: {self.routers.model} has {difference} "
                f"{routers.model}; write one with quantbench experts profile"
            )
        first, second = (half[: len(routers.digests)] for half in self.halves)
        return replace(self, routers=routers, halves=(first, second))

    def save(self, option: str, path: str | Path) -> None:
        """Raises LogError, one line, if the file cannot be written."""
        files.write_text(option, path, json.dumps(to_json(self)) + "\n")

    @staticmethod
    def load(option: str, path: str | Path, value: object = None) -> "Popularity":
        """Raises UsageError, one line with the option, for a file that `quantbench experts profile`
        did not write. value: the file's JSON, if it was read before."""
        if value is None:
            value = files.read_json(option, path, UsageError, AGAIN)
        try:
            if not isinstance(value, dict) or "halves" not in value:
                raise ValueError("it holds no counts")
            if value.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            popularity = from_json(Popularity, value)
            popularity._check()
            return popularity
        except ValueError as error:
            why = f"it holds no popularity of experts: {error}"
            raise UsageError(files.refusal(option, path, why, AGAIN)) from None

    def _check(self) -> None:
        """Raise ValueError for counts that no text can give."""
        routers = self.routers
        of, every = routers.experts_per_token, routers.num_experts
        if not 1 <= of <= every:
            raise ValueError(f"{of} of {every} experts per token is impossible")
        for half in self.halves:
            if tuple(map(len, half)) != routers.experts:
                raise ValueError("its counts have other layers and experts than its routers")
            if any(count < 0 for layer in half for count in layer):
                raise ValueError("a count is below 0")
        for layer, counts in enumerate(self.counts):
            if counts and sum(counts) != self.tokens * of:
                raise ValueError(
                    f"layer {layer} counts {sum(counts)} assignments, where {self.tokens} tokens "
                    f"give {self.tokens * of}"
                )


# ------------------------------------------------------------------------------ the cache folder


def path_of(routers: Routers) -> Path:
    """The file for a model's counts. A quantized or shortened copy of the model has the same."""
    digest = next(filter(None, routers.digests), "unread")
    return files.cache_folder() / "popularity" / f"{digest}.json"


def keep(popularity: Popularity) -> Path:
    """Write the counts of their model, in place of older ones. Raises LogError, one line."""
    path = path_of(popularity.routers)
    with files.named("", path.parent, LogError):
        path.parent.mkdir(parents=True, exist_ok=True)
    popularity.save("", path)
    return path


def find(routers: Routers, option: str) -> Popularity:
    """The counts of this model. Raises UsageError, naming the option, if there are none."""
    path = path_of(routers)
    if not path.exists():
        raise UsageError(
            f"{option}: the cache folder has no counts of {routers.model}'s experts; write them "
            "with quantbench experts profile --checkpoint_path …"
        )
    return Popularity.load(option, path).of_model(routers, option, path)


# ---------------------------------------------------------------------------------------- skew


@dataclass(frozen=True)
class LayerSkew:
    """How unevenly a layer's tokens are routed: what a placement by popularity can gain from it."""

    layer: int
    shares: tuple[float, ...]  # of the layer's assignments, by expert
    effective: float  # this number of experts, chosen evenly, would be as varied
    # The share of assignments to the more popular half of the experts, as chosen by one half of the
    # text and tried on the other; the mean of both ways.
    half_serves: float
    is_flat: bool


def skews(popularity: Popularity) -> list[LayerSkew]:
    """The skew of each layer that has experts."""
    rows = []
    for layer, counts in enumerate(popularity.counts):
        if counts:
            first, second = (half[layer] for half in popularity.halves)
            serves = (_half(first, second) + _half(second, first)) / 2
            shares = tuple(count / max(1, sum(counts)) for count in counts)
            flat = serves - len(counts) // 2 / len(counts) < FLAT
            rows.append(LayerSkew(layer, shares, effective_experts(counts), serves, flat))
    return rows


def effective_experts(counts: Sequence[int]) -> float:
    """How many experts, chosen evenly, would be as varied: exp of the entropy of the shares, from 1
    to the number of experts. 0 without assignments."""
    shares = [count / sum(counts) for count in counts if count]
    return math.exp(-sum(share * math.log(share) for share in shares)) if shares else 0.0


def _half(profiled: tuple[int, ...], tried: tuple[int, ...]) -> float:
    """The share of assignments in `tried` to the half of the experts most chosen in `profiled`."""
    ranked = sorted(range(len(profiled)), key=profiled.__getitem__, reverse=True)
    return sum(tried[expert] for expert in ranked[: len(profiled) // 2]) / max(1, sum(tried))
