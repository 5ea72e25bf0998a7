"""The judge: full precision reads its texts once, and every scheme reads them after it, all in one
process.

    judge = Judge(Held(exact), text=None, tokens=4096)
    judge.scores(Held(plan), max_kl=0.03)   # full precision reads on until the KL is clear of it
    judge.judged(plan, max_kl=0.03)         # the same, as an arm's quality

Schemes are loaded as run/loading.py loads them for a run, so that what is timed is what was judged.
Full precision stays in memory while a scheme fits beside it.
"""

import copy
import dataclasses
import gc
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from quantbench import devices
from quantbench.cli import explained
from quantbench.errors import KernelError, MemoryShortage, UsageError
from quantbench.log.config import RunConfig
from quantbench.models.llama import Transformer, weight_bytes
from quantbench.progress import progress, say
from quantbench.quality import decode_check
from quantbench.quality.layers import sqnr_of_layers
from quantbench.quality.scores import Reference, Scores, read_on, score, summary
from quantbench.quality.texts import ALL_LOOKS, Texts, calibrated_on
from quantbench.quality.thresholds import SURE
from quantbench.quality.types import Judged, LayerSqnr, NoQuality, Quality
from quantbench.run.checks import EXPERTS
from quantbench.run.loading import Loaded, load
from quantbench.run.plan import Plan, begin, make_plan
from quantbench.run.sizes import fits

EMBEDDED_MODEL = "tiny"  # takes the place of random weights, which predict nothing
READ_AGAIN = 1.5e9  # parameters at most: a checkpoint of 3 GB
ROOM = 500_000_000  # bytes to stay free beside two models
# Options of a run that concern its speed alone or the work it does, not what it predicts.
OF_THE_RUN = (
    *("num_layers", "prompt", "prefill_size", "context_depth", "cache_size", "batch_size"),
    *("max_new_tokens", "save", "format", "compile", "compile_prefill", "expert_memory", *EXPERTS),
)


def loaded(plan: Plan) -> Loaded:
    """The plan's model, with progress while it is loaded."""
    with progress(f"Loading {plan.name} as {plan.spec} in {plan.config.precision}") as report:
        return load(plan, report, say)


def quietly(plan: Plan) -> Loaded:
    """The plan's model, without a word."""
    return load(plan, lambda done, total: None, lambda line: None)


class Held:
    """A plan's model: loaded when it is first needed, and again after it was freed."""

    held: Loaded | None = None

    def __init__(self, plan: Plan, load: Callable[[Plan], Loaded] = loaded) -> None:
        self.plan, self.load = plan, load

    @property
    def loaded(self) -> Loaded:
        self.held = self.held or self.load(self.plan)
        return self.held

    @property
    def model(self) -> Transformer:
        return self.loaded.model

    def free(self) -> None:
        self.held = None
        gc.collect()  # reference cycles hold models
        devices.return_freed()


class Judge:
    """Full precision, what it read, and its noise: its decoding steps against its prompts."""

    full: Reference | None = None
    noise: Quality | None = None

    def __init__(self, exact: Held, text: str | None, tokens: int, stands_in: bool = False) -> None:
        """text, tokens: as for Texts. stands_in: for a model of random weights. Raises UsageError
        for a text that will not do."""
        self.exact, self.text, self.texts = exact, text, Texts(exact.plan, text, tokens)
        self.stands_in = stands_in

    @torch.no_grad()
    def read(self, looks: int) -> Reference:
        """Let full precision read so many looks in all, and keep its hidden states."""
        plan, model = self.exact.plan, self.exact.model
        with progress("Full precision: reading", lasting=False, unit="tokens") as report:
            self.full = read_on(plan, model, self.texts, looks, self.full, report)
        self.noise = self.noise or decode_check.noise(plan, model, self.full.passages[0].ids)
        return self.full

    @torch.no_grad()
    def scores(
        self,
        arm: Held,
        max_kl: float | None = None,
        seconds: float = math.inf,
        hopeless: bool = False,
    ) -> Scores:
        """The arm's predictions of what full precision read, which is all of the texts. With max_kl
        both read only on until the KL is clear of it. seconds: for looks beyond the first.
        hopeless: stop within the first one where the KL is far beyond max_kl."""
        full = self.full or self.read(ALL_LOOKS if max_kl is None else 1)
        scores, ends = None, time.monotonic() + seconds
        while True:
            self._make_room(arm)
            model, started = arm.model, time.monotonic()
            with progress(f"{arm.plan.spec}: reading", lasting=False, unit="tokens") as report:
                scores = score(arm.plan, model, full, max_kl, scores, report, hopeless=hopeless)
            del model
            if max_kl is None or full.whole or scores.enough(max_kl):
                return scores
            now = time.monotonic()
            late = now + 2 * (now - started) > ends  # both read as many tokens again
            if late and arm.plan.split is None:  # ranks have to agree
                return scores
            if self.exact.held is None:
                arm.free()  # the two are never in memory together
            full = self.read(full.looks + 1)

    def own(self) -> Judged:
        """Full precision's own quality, which is relative to nothing."""
        full = self.full or self.read(1)
        scores = score(self.exact.plan, self.exact.model, full, own=True)
        return self._judged(self.exact, summary(scores), details=False)

    def judged(
        self, plan: Plan, max_kl: float, seconds: float = math.inf, details: bool = True
    ) -> Judged:
        """An arm's quality, without intervals. details: also of each layer, and of decoding where
        the KL is far beyond the limit. Raises what loading the arm raises."""
        try:
            plan, stands_in = standing_in(plan)
        except (UsageError, KernelError) as error:
            why = f"random weights, and not on the model {EMBEDDED_MODEL}: {error}"
            return Judged(NoQuality(why))
        if judge := calibrated_on(plan, self.text):
            return Judged(NoQuality(f"it was calibrated on {judge}, which judges it"))
        if self.exact.plan.architecture.vocab_size != plan.architecture.vocab_size:
            return Judged(NoQuality("the baseline has another tokenizer"))
        arm = Held(plan, self.exact.load)
        self._make_room(arm)
        arm.plan = self.beside(plan)
        if self.exact.held is None:
            fits(plan, devices.free_memory(plan.device))
        assert arm.loaded
        try:
            scores = self.scores(arm, max_kl, seconds, hopeless=not details)
            kl = scores.mean_kl()
            wanted = details or not kl.mean - SURE * kl.standard_error > max_kl
            return self._judged(arm, summary(scores), details, wanted, stands_in)
        except Exception as error:  # the arm can be timed even so
            if plan.split is not None:
                raise  # the other ranks wait for this one
            return Judged(NoQuality(explained(error)[0]))
        finally:
            arm.free()

    def _judged(
        self,
        arm: Held,
        quality: Quality,
        details: bool,
        decoding: bool = True,
        stands_in: bool = False,
    ) -> Judged:
        if not math.isfinite(quality.perplexity):
            return Judged(NoQuality("its predictions are not numbers"))
        assert self.full and self.noise
        plan, model, ids = arm.plan, arm.model, self.full.passages[0].ids
        noise = self.noise.kl
        stands_in = stands_in or self.stands_in
        quality = dataclasses.replace(
            quality,
            noise=noise,
            model=EMBEDDED_MODEL if stands_in else None,
            decoding=decode_check.check(plan, model, self.full, noise) if decoding else None,
            layers=_layers(plan, model, ids) if details else None,
        )
        return Judged(
            quality,
            None if stands_in else decode_check.likeliest(plan, model, ids),
            weight_bytes(model),
            arm.loaded.kernels,
        )

    def beside(self, plan: Plan) -> Plan:
        """The plan, with the weights of full precision where that is in memory and has the floats
        that the plan would read."""
        exact, own = self.exact.plan.config, plan.config
        same = ("checkpoint_path", "precision", "device", "num_layers", "expert_memory")
        is_same = all(getattr(exact, name) == getattr(own, name) for name in same)
        in_parts = plan.split is not None or own.expert_memory is not None
        has_floats = self.exact.held is not None and str(self.exact.plan.spec) == "none"
        if not (is_same and has_floats) or in_parts or plan.checkpoint.saved:
            return plan
        checkpoint = copy.copy(plan.checkpoint)
        checkpoint.in_memory = _InMemory(self.exact.model)
        return dataclasses.replace(plan, checkpoint=checkpoint)

    def _make_room(self, arm: Held) -> None:
        """Free full precision where the arm does not fit beside it. Of ranks, which have to agree,
        none has both."""
        free = devices.free_memory(arm.plan.device)
        if arm.held is not None or self.exact.held is None or free is None:
            return
        try:
            fits(arm.plan, 0 if arm.plan.split else max(0, free - ROOM))
        except MemoryShortage:
            self.exact.free()


@dataclasses.dataclass(frozen=True)
class _InMemory:
    """Weights of full precision as models.formats.base.Tensors, which need not be read again."""

    model: Transformer

    def check(self, model: Transformer, depth: int) -> None:
        """They are those of a model that was loaded."""

    def read(self, name: str, like: Tensor, cut: object = None) -> Tensor:
        return self.model.get_parameter(name).to(like.dtype, copy=True)


def _layers(plan: Plan, model: Transformer, ids: list[int]) -> list[LayerSqnr] | None:
    """Each layer against full precision, where that is there and can be read again in seconds;
    none of a rank, which has only parts of layers."""
    exact = str(plan.spec) == "none" or plan.checkpoint.saved
    if plan.split is not None or exact or plan.architecture.parameters() > READ_AGAIN:
        return None
    return sqnr_of_layers(plan, model, ids)


def full_precision(config: RunConfig) -> Plan:
    """A plan for the config's model in full precision."""
    unquantized = {"quantization": "none", "kernel": "auto", "kv_cache": "dense"}
    full = dataclasses.replace(config, **unquantized, kv_cache_quantization=False)  # type: ignore
    return begin(make_plan(full))


def standing_in(plan: Plan) -> tuple[Plan, bool]:
    """The plan itself; where its weights are random, that of the same scheme, kernel and cache on
    the embedded model, and True.

    Raises UsageError or KernelError where that model cannot take them.
    """
    if not plan.config.checkpoint_path.startswith("dummy:"):
        return plan, False
    if plan.spec.scheme is None:
        raise UsageError(f"{plan.spec} chooses by a model's own layers")
    config = dataclasses.replace(plan.config.without(OF_THE_RUN), checkpoint_path=EMBEDDED_MODEL)
    return begin(make_plan(config)), True
