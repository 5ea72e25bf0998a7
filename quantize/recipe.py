"""A recipe: a JSON file that names a scheme per layer, for --quantization.

    {"recipe": 1,
     "model": {"name": "SmolLM2-135M", "layers": 30, "shapes": "5d0c1f0e"},
     "schemes": {"layers.0.feed_forward.w2": "int8wo", "layers.*": "int4wo-64", "output": "int8wo"},
     "kv_cache": "int8",
     "about": {"made by": "…"}}

    recipe = read("mix.json").of_layers("SmolLM2-135M", config.linear_shapes())
    recipe.layers           # (("layers.0.attention.wqkv", Int4WeightOnly(64)), …)

"mix.json@2fcf02fa", as logs have it, is this very recipe or refused: the digest is of everything
but "about". A key of "schemes" is a layer's name or a pattern with * and ?; the exact name counts
before the first pattern that matches. Every linear layer needs a scheme. The embedding,
tok_embeddings, has one only by its exact name. "kv_cache" and "about" may be left out. No torch
here.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from quantbench import files
from quantbench.errors import UsageError
from quantbench.kv_cache import CACHES
from quantbench.quantize.spec import AsIs, FullPrecision, Int8Embedding, Int8WeightOnly, Spec, named
from quantbench.text import shown
from quantbench.typed_json import from_json, omitted, to_json

VERSION = 1
EMBEDDING = "tok_embeddings"
OF_EMBEDDINGS = (FullPrecision(), Int8Embedding())
Shapes = Mapping[str, tuple[int, int]]  # (out_features, in_features) by the linear layer's name


@dataclass(frozen=True)
class RecipeModel:
    """What a recipe is for."""

    name: str  # for people: a model of another name and the same shapes takes the recipe, too
    layers: int
    shapes: str  # digest of the linear layers' names and shapes

    @staticmethod
    def of(name: str, shapes: Shapes) -> "RecipeModel":
        numbers = {layer.split(".")[1] for layer in shapes if layer.startswith("layers.")}
        return RecipeModel(name, len(numbers), _digest({key: list(shapes[key]) for key in shapes}))


@dataclass
class RecipeFile:
    recipe: int
    model: RecipeModel
    schemes: dict[str, str]
    kv_cache: str | None = omitted()
    about: dict[str, Any] | None = omitted()


@dataclass(frozen=True)
class Recipe(AsIs):
    """A scheme per layer; `layers` is empty until `of_layers` has met the model."""

    numerics = "each layer as the recipe says"
    phrase = "a scheme per layer"
    model: RecipeModel = RecipeModel("", 0, "")
    schemes: tuple[tuple[str, Spec], ...] = ()  # by name or pattern
    kv_cache: str | None = None  # a name of CACHES; None: as --kv_cache says
    path: str = dataclasses.field(default="", compare=False)
    about: dict[str, Any] | None = dataclasses.field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.path}@{self.digest}" if self.path else self.name

    @property
    def name(self) -> str:
        return f"recipe-{self.digest}"

    @property
    def digest(self) -> str:
        """Of everything but `about`."""
        return _digest(to_json(dataclasses.replace(_file(self), about=None)))

    @property
    def candidates(self) -> tuple[Spec, ...]:
        return tuple(dict.fromkeys(spec for _, spec in self.schemes))

    @property
    def calibrated(self) -> bool:
        return any(spec.calibrated for spec in self.candidates)

    def of_layers(self, name: str, shapes: Shapes) -> "Recipe":
        """The recipe with `layers`, for a model of this name. Raises UsageError for a recipe of
        another model, for patterns without a layer and layers without a scheme."""
        model, expected = RecipeModel.of(name, shapes), self.model
        if (model.layers, model.shapes) != (expected.layers, expected.shapes):
            raise self._refused(
                f"it is for {expected.name}, with {expected.layers} layers of shapes "
                f"{expected.shapes}; {name} has {model.layers} layers of shapes {model.shapes}: "
                "give a recipe for this model"
            )
        matching = {
            pattern: [layer for layer in shapes if fnmatchcase(layer, pattern)]
            for pattern, _ in self.schemes
            if pattern != EMBEDDING
        }
        if unknown := [pattern for pattern, layers in matching.items() if not layers]:
            raise self._refused(f"unknown layers: {_some(unknown)}; layers are {_some([*shapes])}")
        schemes = dict(self.schemes)
        of = {layer: schemes[p] for p in reversed(matching) for layer in matching[p]}
        of |= {layer: schemes[layer] for layer in shapes if layer in schemes}
        if without := [layer for layer in shapes if layer not in of]:
            raise self._refused(f"no scheme for {_some(without)}")
        embedding = schemes.get(EMBEDDING, FullPrecision())
        if embedding not in OF_EMBEDDINGS:
            accepted = " or ".join(map(str, OF_EMBEDDINGS))
            raise self._refused(f"{EMBEDDING} takes {accepted}; given: {embedding}")
        if embedding == Int8Embedding():
            of[EMBEDDING] = embedding
            if of["output"] == Int8WeightOnly():  # the same numbers: a tied output shares the table
                of["output"] = embedding
        layers = ((layer, of[layer]) for layer in (EMBEDDING, *shapes) if layer in of)
        return dataclasses.replace(self, layers=tuple(layers))

    def _refused(self, why: str) -> UsageError:
        return UsageError(files.refusal("--quantization", self.path or self.name, why))


def make(
    name: str,
    shapes: Shapes,
    schemes: Mapping[str, str],
    kv_cache: str | None = None,
    about: dict[str, Any] | None = None,
) -> Recipe:
    """A recipe for a model of this name and these linear layers. schemes: names of schemes by name
    or pattern of layers. Raises UsageError as `read`, and as `Recipe.of_layers`."""
    file = RecipeFile(VERSION, RecipeModel.of(name, shapes), dict(schemes), kv_cache, about)
    return _recipe(file).of_layers(name, shapes)


def read(path: str, digest: str | None = None, option: str = "--quantization") -> Recipe:
    """The recipe in a file. digest: the recipe's that is expected; None for any. option: the one
    that names the file. Raises UsageError for a file that holds no recipe, or another than that of
    the digest, for an unknown scheme and for another version."""
    value = files.read_json(option, path)
    try:
        if not isinstance(value, dict) or "recipe" not in value:
            raise ValueError('it is no recipe: a recipe has "recipe": 1')
        if type(value["recipe"]) is not int or value["recipe"] != VERSION:
            raise ValueError(f"it has version {shown(value['recipe'])}; supported: {VERSION}")
        keys = list(RecipeFile.__dataclass_fields__)
        if unknown := [key for key in value if key not in keys]:
            raise ValueError(f"unknown keys: {_some(unknown)}; keys are {', '.join(keys)}")
        recipe = dataclasses.replace(_recipe(from_json(RecipeFile, value)), path=path)
        if digest not in (None, recipe.digest):
            raise ValueError(f"it holds {recipe.name} now; expected is recipe-{digest}")
        return recipe
    except (ValueError, UsageError) as error:
        raise UsageError(files.refusal(option, path, error)) from None


def _recipe(file: RecipeFile) -> Recipe:
    if file.kv_cache not in (None, *CACHES):
        raise UsageError(f"kv_cache takes {', '.join(CACHES)}; given: {shown(file.kv_cache)}")
    schemes = {pattern: named(name, f"{shown(pattern)}:") for pattern, name in file.schemes.items()}
    for pattern, spec in schemes.items():
        if not isinstance(spec, Spec) or isinstance(spec, AsIs) or spec.way == "wanda":
            raise UsageError(f"{shown(pattern)}: {spec} cannot be the scheme of a single layer")
    kind = cast(dict[str, Spec], schemes)
    return Recipe((), "", file.model, tuple(kind.items()), file.kv_cache, about=file.about)


def write(path: str, recipe: Recipe) -> None:
    """Raises LogError for a file that cannot be written."""
    files.write_text("recipe", path, json.dumps(to_json(_file(recipe)), indent=1) + "\n")


def _file(recipe: Recipe) -> RecipeFile:
    schemes = {pattern: str(spec) for pattern, spec in recipe.schemes}
    return RecipeFile(VERSION, recipe.model, schemes, recipe.kv_cache, recipe.about)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


def _some(names: list[str]) -> str:
    """The first names, and how many there are."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(shown, names[:3])) + rest
