"""The search for a recipe: damage and cost of every scheme in every layer, a choice, its check.

found = search(config, Budget(bits=4.5))
found.mixture               # a scheme by layer
found.recipe.kl, found.uniform[0].kl, found.better
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantbench import devices, files
from quantbench.errors import QuantbenchError, UsageError
from quantbench.estimate.answer import generator_of
from quantbench.estimate.here import here
from quantbench.estimate.predict import Request
from quantbench.log.config import RunConfig
from quantbench.models.formats import open_checkpoint
from quantbench.models.loading import load_model
from quantbench.progress import progress
from quantbench.quality.judge import Held, Judge, full_precision
from quantbench.quality.scores import Scores
from quantbench.quality.texts import judge_of
from quantbench.quantize import recipe
from quantbench.quantize.recipe import Recipe
from quantbench.quantize.spec import FullPrecision, Spec, parse_scheme
from quantbench.recipe.choice import GroupOption, choose, least, options, total, uniform
from quantbench.recipe.cost import Costs, candidates
from quantbench.recipe.damage import Damage, damages
from quantbench.run.calibration import ROWS, TOKENS, token_ids
from quantbench.run.calibration import TEXT as CALIBRATION_TEXT
from quantbench.run.plan import Plan
from quantbench.text import size
from quantbench.typed_json import to_json

SEQUENCES, LENGTH = 8, 256  # of the text that the damage is estimated on
JUDGED_TOKENS = 2048  # of the texts of quality
RECIPE = "recipe"
UNIFORM = 2  # uniform schemes that are measured, at most: the best by their estimates
NEAR = 1.5  # times the least estimate: a scheme above cannot have the least KL
ROUNDS = 3  # of choosing anew, until the KL is SLACK to 1 times --max_kl
SLACK, MARGIN = 0.9, 0.97  # MARGIN: of the damage that would just satisfy it
DOUBT = 1.2  # times --max_kl, of the estimates of schemes that may satisfy it


@dataclass(frozen=True)
class Budget:
    """None: no limit."""

    max_memory: int | None = None  # bytes, the peak while generating
    bits: float | None = None  # a weight of the linear layers, with scales
    min_tok_s: float | None = None  # while decoding
    max_kl: float | None = None  # nats a token: then the smallest model is chosen


@dataclass(frozen=True)
class MeasuredRecipe:
    """A recipe or a uniform scheme."""

    name: str
    bits: float  # a weight of the linear layers
    memory_bytes: int  # the peak while generating, predicted
    tok_s: float | None  # while decoding, predicted from timed products
    predicted_kl: float
    kl: float  # nats a token, on the judging texts
    kl_interval: tuple[float, float]  # 95 %

    @property
    def ratio(self) -> float | None:
        """Estimated ÷ measured KL."""
        return self.predicted_kl / self.kl if self.kl > 0 else None


@dataclass(frozen=True)
class Found:
    """What a search has found. Better: whether the recipe is to be taken, and not uniform[0]."""

    model: str
    mixture: Recipe
    max_kl: float | None  # as asked for
    recipe: MeasuredRecipe
    uniform: list[MeasuredRecipe]  # the one to compare with first
    difference: tuple[float, float]  # of the recipe's KL to that of uniform[0], 95 %
    better: bool


def calibration_tokens(plan: Plan, text: str | None) -> Tensor:
    """The tokens (B, LENGTH) that the damage is estimated on: sequences from all over `text`, by
    default the text that calibrates schemes.

    Raises UsageError for a text that is shorter than LENGTH, or is one that judges.
    """
    source = Path(text or CALIBRATION_TEXT)
    if judge := judge_of(plan, None, source):
        raise UsageError(
            f"--text {source} has parts of {judge.name}, on which the recipe is judged: a recipe "
            "made for them would look better than it is; give another text"
        )
    tokenizer = plan.tokenizer
    opening = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    length = min(LENGTH, plan.architecture.max_position) - len(opening)
    ids = tokenizer.encode(files.read_text("--text", source), bos=False)
    if text is None:
        ids = ids[ROWS * TOKENS :]  # GPTQ errs less on what calibrated it
    count = min(SEQUENCES, len(ids) // length)
    if count == 0:
        raise UsageError(
            f"--text {source}: {len(ids)} tokens are too few; {length} is the least, "
            f"{SEQUENCES * length} are used"
        )
    starts = range(0, count * (len(ids) // count), len(ids) // count)
    found = [[*opening, *ids[start : start + length]] for start in starts]
    return torch.tensor(found, device=plan.device)


class Search:
    """The exact model's plan, every group's options, what they may cost in all, and their KL."""

    def __init__(
        self, config: RunConfig, asked: Budget, text: str | None, calibrated: bool
    ) -> None:
        """Raises UsageError for a budget below the smallest schemes, before anything is slow."""
        if open_checkpoint(config.checkpoint_path).in_full_precision() is None:
            raise UsageError(f"--checkpoint_path {config.checkpoint_path} was saved quantized; "
                             "recipes are made of full-precision weights: give these")  # fmt: skip
        self.asked, self.plan = asked, full_precision(config)
        plan = self.plan
        if plan.architecture.shared_layers or plan.architecture.layer_input_dim:
            raise UsageError(
                f"recipe: layers of {plan.architecture.name} read what others computed, which the "
                "search does not follow; compare schemes: quantbench recommend"
            )
        tokens = calibration_tokens(plan, text)
        specs = candidates(plan.device, plan.precision, calibrated)
        self.costs = Costs(plan.architecture, specs, plan.device, plan.precision)
        self.weights = sum(rows * columns for rows, columns in self.costs.shapes.values())
        request = Request.of(
            config, plan.architecture, "none", len(plan.prompt),
            kv_cache=plan.kv_cache, tp=1, cache_size=plan.cache_size,
        )  # fmt: skip
        machine = here(generator_of, plan.device)
        self.groups = self._options(dict.fromkeys(self.costs.of, 0.0))
        memory = max(machine.memories(request).values(), key=lambda phase: phase.total)
        self.fixed_bytes = memory.total - total(self._in_full(), "held")
        if machine.is_cpu:  # a process has read the checkpoint's description by now, as a run does
            devices.reset_peak_memory(plan.device)
            resident = next(iter(devices.peak_memory(plan.device).values()))
            self.fixed_bytes += max(0, resident - memory.workspace)
        self.fixed_seconds = 0.0
        if asked.min_tok_s is not None:
            self.costs.set_seconds(self.costs.time(plan.config))
            self.groups = self._options(dict.fromkeys(self.costs.of, 0.0))
            step = machine.phases(request)[1].seconds
            self.fixed_seconds = max(0.0, step - total(self._in_full(), "seconds"))
        self.limits = self._limits()
        others = token_ids(None, plan.tokenizer, plan.device)[:, : tokens.shape[1]]
        self.groups = self._options(
            self._damage(tokens, others if calibrated else others[:0], specs)
        )

    def _damage(self, tokens: Tensor, others: Tensor, specs: Sequence[Spec]) -> Damage:
        plan = self.plan
        with progress("Loading the weights") as report:
            model = load_model(plan.checkpoint, plan.device, plan.precision,
                               plan.config.num_layers, progress=report)  # fmt: skip
        with progress("Damage of every scheme in every layer", unit="layers") as report:
            return damages(model, tokens, others, specs, report)

    def _options(self, damage: Mapping[tuple[str, str], float]) -> list[list[GroupOption]]:
        return options(damage, self.costs, self.plan.architecture.tie_embeddings)

    def _in_full(self) -> list[GroupOption]:
        return uniform(self.groups)[str(FullPrecision())]

    def _limits(self) -> dict[str, float]:
        """The most of each field of Option."""
        asked, batch = self.asked, self.plan.config.batch_size
        smallest = {name: least(self.groups, name) for name in ("stored", "held", "seconds")}
        limits = {}
        if asked.bits is not None:
            limits["stored"] = asked.bits / 8 * self.weights
            _check("bits", asked.bits, 8 * smallest["stored"] / self.weights, "{:.3g}".format)
        if asked.max_memory is not None:
            limits["held"] = asked.max_memory - self.fixed_bytes
            _check("max_memory", asked.max_memory, self.fixed_bytes + smallest["held"], size)
        if asked.min_tok_s is not None:
            limits["seconds"] = batch / asked.min_tok_s - self.fixed_seconds
            most = batch / (self.fixed_seconds + smallest["seconds"])
            if asked.min_tok_s > most:
                reach = f"the fastest schemes for this model reach about {most:.3g} here"
                raise UsageError(f"--min_tok_s {asked.min_tok_s:g}: {reach}; ask for less")
        return limits

    def choose(self, kl: float | None) -> list[GroupOption]:
        """The least damage within the limits; with `kl` the smallest model that keeps it."""
        limits = self.limits if kl is None else self.limits | {"damage": kl}
        chosen = choose(self.groups, "damage" if kl is None else "held", limits)
        if chosen is None:
            raise UsageError("no mixture satisfies all limits at once; allow more of one of them")
        return chosen

    def rivals(self, limits: Mapping[str, float], by: str) -> dict[str, list[GroupOption]]:
        """The uniform schemes within the limits, by a field of Option, the least first."""
        kinds = sorted(uniform(self.groups).items(), key=lambda pair: total(pair[1], by))
        return {
            name: kind
            for name, kind in kinds
            if all(total(kind, field) <= most for field, most in limits.items())
        }

    def mixture(self, chosen: Sequence[GroupOption]) -> Recipe:
        schemes = {name: how for option in chosen for name, how in option.schemes.items()}
        cache = None if self.plan.kv_cache == "dense" else self.plan.kv_cache
        return recipe.make(self.plan.name, self.costs.shapes, schemes, cache)

    def measured(self, name: str, chosen: Sequence[GroupOption], scores: Scores) -> MeasuredRecipe:
        """The figures of a choice that was read as `scores`."""
        kl, seconds = scores.mean_kl(), self.fixed_seconds + total(chosen, "seconds")
        timed = self.asked.min_tok_s is not None
        bits = 8 * total(chosen, "stored") / self.weights
        memory = round(self.fixed_bytes + total(chosen, "held"))
        tok_s = self.plan.config.batch_size / seconds if timed else None
        return MeasuredRecipe(
            name, bits, memory, tok_s, total(chosen, "damage"), kl.mean, kl.ends()
        )

    @functools.cached_property
    def judge(self) -> Judge:
        """The exact model on the judging texts."""
        return Judge(Held(self.plan), None, JUDGED_TOKENS)

    def scores(self, spec: Spec) -> Scores:
        """The mixture's predictions of every judging token, by the kernels that a run would use,
        compared with the exact model's."""
        return self.scores_of(dataclasses.replace(self.plan, spec=spec))

    def scores_of(self, plan: Plan) -> Scores:
        """As `scores`, of any plan for the model."""
        return self.judge.scores(Held(plan))


def _check(option: str, given: float, smallest: float, write: Callable[[float], str]) -> None:
    if given < smallest:
        raise UsageError(
            f"--{option} {write(given)}: the smallest schemes for this model come to "
            f"{write(smallest)}; allow more, or take a smaller model"
        )


def search(
    config: RunConfig, asked: Budget, text: str | None = None, calibrated: bool = True
) -> Found:
    """text: what the damage is estimated on; None: the text that calibrates schemes. calibrated:
    whether layers may get a scheme that is calibrated.

    Raises UsageError for a budget that nothing satisfies, and as calibration_tokens.
    """
    state = Search(config, asked, text, calibrated)
    aim = most = asked.max_kl
    tried: list[tuple[MeasuredRecipe, Recipe, Scores]] = []
    for _ in range(ROUNDS):
        chosen = state.choose(aim)
        mixture = state.mixture(chosen)
        scores = state.scores(mixture)
        tried.append((state.measured(RECIPE, chosen, scores), mixture, scores))
        kl = tried[-1][0].kl
        if aim is None or most is None or SLACK * most <= kl <= most:
            break
        aim *= MARGIN * most / max(kl, 1e-9)
    allowed = [one for one in tried if most is None or one[0].kl <= most]
    if not allowed:
        smallest = min(one.kl for one, _, _ in tried)
        raise QuantbenchError(f"--max_kl {most:g}: the recipes that were tried have {smallest:.3g} "
                              "or more; allow more, or give another budget")  # fmt: skip
    ours, mixture, scores = min(allowed, key=lambda one: one[0].memory_bytes)
    limits = state.limits if most is None else state.limits | {"damage": DOUBT * most}
    rivals: list[tuple[MeasuredRecipe, Scores]] = []
    able = state.rivals(limits, "damage" if most is None else "held")
    near = NEAR * min((total(kind, "damage") for kind in able.values()), default=0.0)
    for name, kind in able.items():
        if most is None and total(kind, "damage") > near:
            break
        found = state.scores(parse_scheme(name))
        rival = state.measured(name, kind, found)
        if most is None or rival.kl <= most:
            rivals.append((rival, found))
        if len(rivals) == (UNIFORM if most is None else 1):
            break
    rivals.sort(key=lambda pair: pair[0].kl)
    difference = -math.inf, math.inf
    if rivals:
        kl_of_both = {"kl": scores["kl"] - rivals[0][1]["kl"]}
        difference = Scores(scores.passages, kl_of_both).mean_kl().ends()
    measured = [one for one, _ in rivals]
    smaller = not rivals or ours.memory_bytes < measured[0].memory_bytes
    better = not rivals or difference[1] < 0 if most is None else smaller
    return Found(state.plan.name, mixture, most, ours, measured, difference, better)


def write(found: Found, path: str) -> None:
    """Write the recipe, with the figures that were measured. Raises LogError."""
    about = {"recipe": found.recipe, "uniform": found.uniform, "better": found.better}
    recipe.write(path, dataclasses.replace(found.mixture, about=to_json(about)))
