"""How well an arm still predicts, and how far its predictions are from a reference's.

Passages go through the model in a KV cache of the arm's own kind, so that the error of a quantized
cache counts as well. The reference's final hidden states are kept, and its own head runs over them
again: that is exact, and takes the vocabulary's share of the model's width less than logits.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantbench.errors import KernelError, UsageError
from quantbench.generate import Generator
from quantbench.kv_cache.base import KVCache
from quantbench.log.config import RunConfig
from quantbench.models.llama import Transformer
from quantbench.quality import block_errors, decode_check, texts
from quantbench.quality.block_errors import Estimate, block_mean, mean_of
from quantbench.quality.layer_sqnr import sqnr_of_layers
from quantbench.quality.reference import Head, Reference
from quantbench.quality.texts import Passage
from quantbench.quality.thresholds import MAX_KL, settled
from quantbench.quality.types import (
    LayerSqnr,
    NoQuality,
    Part,
    Quality,
    QualityAnswer,
    ReferenceFile,
)
from quantbench.run.checks import EXPERTS
from quantbench.run.loading import Loading
from quantbench.run.plan import Plan, begin, make_plan

EMBEDDED_MODEL = "tiny"  # takes the place of random weights, which predict nothing
READ_AGAIN = 1.5e9  # parameters at most: a checkpoint of 3 GB
CHECKED = (65, 16)  # a window of 65 tokens is read both ways, its last 16 by steps: 1 or 2 s
CHUNK, ROWS = 512, 64  # tokens that are read at once; rows of logits in float64 at once
BLOCK = 32  # tokens, which depend on each other; at least four blocks of each text
DEPTHS = (("0-1k", 0), ("1-8k", 1024), ("8-32k", 8192), ("32k+", 32768), ("", 1 << 62))
# Options of a run that concern its speed alone or the work it does, not what it predicts.
OF_THE_RUN = (
    *("num_layers", "prompt", "prefill_size", "context_depth", "cache_size", "batch_size"),
    *("max_new_tokens", "save", "expert_memory", *EXPERTS),
)
Report = Callable[[int, int], None]


class Reader:
    """Reads passages through a KV cache of the plan's kind."""

    def __init__(self, plan: Plan, model: Transformer) -> None:
        self.plan, self.model = plan, model
        self.size, self.caches = 0, list[KVCache]()

    def hidden(self, passage: Passage) -> Tensor:
        """The last layer's outputs (n, D) that predict passage.ids[first:]."""
        ids = torch.tensor(passage.ids[:-1], device=self.plan.device)
        if len(ids) > self.size:
            self.size = len(ids)
            self.caches = []  # before the larger ones are made
            self.caches = Generator(self.model, 1, self.size, self.plan.kv_cache).caches
        parts, start = [], 0
        for chunk in torch.split(ids, CHUNK):
            positions = torch.arange(start, start + len(chunk))
            parts.append(self.model.hidden(chunk[None], positions, self.caches)[0])
            start += len(chunk)
        return torch.cat(parts)[passage.first - 1 :]


@dataclass(frozen=True)
class Scores:
    """Predictions of passages. The tensors, (N,) float64 on the CPU, have a row for each token;
    without a reference there is only `nats`."""

    passages: list[Passage]
    nats: Tensor  # negative log-likelihood by the model
    reference_nats: Tensor | None = None  # by the reference
    kl: Tensor | None = None  # KL(reference ‖ model) in nats
    top1: Tensor | None = None  # 1 where the likeliest tokens are the same
    top5: Tensor | None = None  # share of the reference's five likeliest among the model's
    right: Tensor | None = None  # 1 where the model's likeliest token is the text's
    reference_right: Tensor | None = None

    def __add__(self, other: "Scores") -> "Scores":
        rows = {name: torch.cat([getattr(self, name), getattr(other, name)]) for name in self.names}
        return Scores(self.passages + other.passages, **rows)

    @property
    def names(self) -> list[str]:
        fields = dataclasses.fields(self)[1:]
        return [field.name for field in fields if getattr(self, field.name) is not None]

    def labels(self) -> list[str]:
        """Each token's text."""
        return [part.text for part in self.passages for _ in range(part.predicted)]

    def depths(self) -> Tensor:
        """Each token's position in its passage."""
        return torch.cat([torch.arange(part.first, len(part.ids)) for part in self.passages])

    def of_text(self, name: str) -> "Scores":
        """Those of one text."""
        chosen = torch.tensor([label == name for label in self.labels()])
        rows = {row: getattr(self, row)[chosen] for row in self.names}
        return Scores([part for part in self.passages if part.text == name], **rows)

    def estimate(self, values: Tensor, chosen: Tensor | None = None) -> Estimate:
        """The mean of values (N,), of the chosen tokens (N,) if given, from blocks of them."""
        size = max(1, min(BLOCK, len(self.nats) // 4))
        counts = [part.predicted for part in self.passages]
        kept = torch.ones_like(values) if chosen is None else chosen.double()
        sums, weights = (
            [
                block.sum().item()
                for part in torch.split(rows, counts)
                for block in torch.split(part, size)
            ]
            for rows in (values * kept, kept)
        )
        pairs = [(a, b) for a, b in zip(sums, weights, strict=True) if b]
        return block_mean(*map(list, zip(*pairs, strict=True)))

    def mean_kl(self) -> Estimate:
        """The mean divergence, each text counting alike."""
        found = []
        for name in dict.fromkeys(part.text for part in self.passages):
            own = self.of_text(name)
            assert own.kl is not None
            found.append(own.estimate(own.kl))
        return mean_of(found)


def score(
    plan: Plan,
    model: Transformer,
    passages: Sequence[Passage],
    reference: Reference | None = None,
    max_kl: float | None = None,
    keep: list[Tensor] | None = None,
    report: Report = lambda done, total: None,
    before: Scores | None = None,
) -> Scores:
    """Predict the passages, one look after the other, until the KL is clear of `max_kl`.

    reference: what kept these passages' hidden states. keep: gets the hidden states (n, D) of each
    passage. report: called as (tokens done, total). before: scores of earlier looks.
    """
    reader, scores = Reader(plan, model), before
    head = reference.head(plan) if reference else None
    done, total = 0, sum(part.predicted for part in passages)
    for _, look in groupby(passages, lambda part: part.look):
        for passage in look:
            x = reader.hidden(passage)
            if keep is not None:
                keep.append(x.cpu())
            full = reference.hidden(passage).to(x.device) if reference else None
            rows = Scores([passage], **_rows(model, x, head, full, passage))
            scores = scores + rows if scores else rows
            done += passage.predicted
            report(done, total)
        assert scores is not None
        if reference and max_kl is not None:
            kl = scores.mean_kl()
            if settled(kl.mean, kl.standard_error, max_kl):
                break
    assert scores is not None
    return scores


def _rows(
    model: Transformer, x: Tensor, head: Head | None, full: Tensor | None, passage: Passage
) -> dict[str, Tensor]:
    """The tensors of Scores for one passage: x and full are the hidden states (n, D)."""
    found: dict[str, list[Tensor]] = {}

    def add(**rows: Tensor) -> None:
        for name, row in rows.items():
            found.setdefault(name, []).append(row.double().cpu())

    where = "cpu" if x.device.type == "mps" else x.device  # which has no float64
    targets = torch.tensor(passage.ids[passage.first :], device=where)
    for rows in torch.split(torch.arange(len(x)), ROWS):
        begin, end = int(rows[0]), int(rows[-1]) + 1
        target = targets[begin:end]
        logits = model.logits(x[None, begin:end])[0].to(where)
        q = logits.double().log_softmax(-1)
        add(nats=F.nll_loss(q, target, reduction="none"))
        if head is None or full is None:
            continue
        p = head(full[None, begin:end])[0].to(where)
        five, own = p.topk(5).indices, logits.topk(5).indices
        p = p.double().log_softmax(-1)
        add(
            reference_nats=F.nll_loss(p, target, reduction="none"),
            kl=(p.exp() * (p - q)).sum(-1),
            top1=five[:, 0] == own[:, 0],
            top5=(five[:, :, None] == own[:, None]).any(-1).double().mean(-1),
            right=own[:, 0] == target,
            reference_right=five[:, 0] == target,
        )
    return {name: torch.cat(parts) for name, parts in found.items()}


def summary(scores: Scores) -> Quality:
    """The figures with their standard errors. `with_interval` adds intervals, which take scipy."""
    mean = scores.estimate(scores.nats)
    perplexity = block_errors.ratio(mean.mean)
    error = _known(mean)
    quality = Quality(
        len(scores.nats),
        perplexity,
        None if error is None else perplexity * error,
        bits_per_byte=_bits_per_byte(scores),
        window=max(len(part.ids) - 1 for part in scores.passages),
    )
    if scores.kl is None:
        return quality
    assert scores.reference_nats is not None and scores.right is not None
    assert scores.top1 is not None and scores.top5 is not None
    assert scores.reference_right is not None
    difference, kl = scores.estimate(scores.nats - scores.reference_nats), scores.mean_kl()
    ratio, error = block_errors.ratio(difference.mean), _known(difference)
    return dataclasses.replace(
        quality,
        perplexity_ratio=ratio,
        perplexity_ratio_standard_error=None if error is None else ratio * error,
        perplexity_ratio_freedom=None if error is None else difference.freedom,
        kl=max(0.0, kl.mean),  # rounding can leave it a little below
        kl_standard_error=_known(kl),
        kl_freedom=None if _known(kl) is None else kl.freedom,
        kl_median=scores.kl.median().item(),
        kl_p99=scores.kl.quantile(0.99).item(),
        kl_max=scores.kl.max().item(),
        top1=scores.top1.mean().item(),
        top5=scores.top5.mean().item(),
        lost=(scores.reference_right * (1 - scores.right)).mean().item(),
        gained=(scores.right * (1 - scores.reference_right)).mean().item(),
        texts=list(_of_texts(scores)),
        depths=list(_of_depths(scores)),
    )


def of_reference(scores: Scores) -> Quality:
    """The reference's own figures on the same tokens."""
    assert scores.reference_nats is not None
    return summary(Scores(scores.passages, scores.reference_nats))


def _of_texts(scores: Scores) -> Iterator[Part]:
    for name, digest in {part.text: part.digest for part in scores.passages}.items():
        own = scores.of_text(name)
        yield dataclasses.replace(_part(name, own, torch.ones(len(own.nats))), digest=digest)


def _of_depths(scores: Scores) -> Iterator[Part]:
    depths = scores.depths()
    for (name, low), (_, high) in pairwise(DEPTHS):
        chosen = (depths >= low) & (depths < high)
        if chosen.any():
            yield _part(name, scores, chosen)


def _part(name: str, scores: Scores, chosen: Tensor) -> Part:
    assert scores.kl is not None and scores.top1 is not None
    assert scores.reference_nats is not None
    kl, chosen = scores.estimate(scores.kl, chosen), chosen.bool()
    nats = (scores.nats - scores.reference_nats)[chosen].mean().item()
    return Part(
        name=name,
        tokens=int(chosen.sum()),
        kl=max(0.0, kl.mean),
        kl_standard_error=_known(kl),
        top1=scores.top1[chosen].mean().item(),
        perplexity_ratio=block_errors.ratio(nats),
    )


def _bits_per_byte(scores: Scores) -> float | None:
    """Of the texts that no model wrote."""
    counts = [part.predicted for part in scores.passages]
    known = [
        (nats.sum().item(), part.bytes)
        for nats, part in zip(torch.split(scores.nats, counts), scores.passages, strict=True)
        if part.bytes
    ]
    size = sum(count for _, count in known)
    return sum(nats for nats, _ in known) / math.log(2) / size if size else None


def _known(estimate: Estimate) -> float | None:
    return estimate.standard_error if math.isfinite(estimate.standard_error) else None


@torch.no_grad()
def quick(
    plan: Plan,
    model: Transformer,
    tokens: int,
    text: str | None,
    reference: ReferenceFile | None,
    keep: str | None,
    max_kl: float = MAX_KL,
) -> QualityAnswer:
    """An arm's quality, without intervals, and a check of decoding.

    tokens: the most that are predicted, 0 for all. A baseline predicts them all, an arm with a
    `reference` as many of the baseline's as it takes until its KL is clear of `max_kl`.
    keep: a path for this model's hidden states, which the answer then names.
    A model of random weights is replaced by the embedded one in the same scheme.
    """
    stand_in = None
    if plan.config.checkpoint_path.startswith("dummy:"):
        try:
            plan, model = embedded(plan)
        except (UsageError, KernelError) as error:
            return QualityAnswer(
                NoQuality(f"random weights, and not on the model {EMBEDDED_MODEL}: {error}")
            )
        stand_in = EMBEDDED_MODEL
    full = Reference(reference.path) if reference else None
    if full and full.about.vocab_size != plan.architecture.vocab_size:
        return QualityAnswer(NoQuality("the baseline has another tokenizer"))
    found = (
        full.about.passages
        if full
        else texts.passages(plan, text, tokens, lambda: texts.written(plan, model))
    )
    hidden: list[Tensor] | None = [] if keep else None
    scores = score(plan, model, found, full, max_kl, hidden)
    if keep and hidden:
        Reference.write(keep, plan, found, hidden)
    file = ReferenceFile(keep) if keep else None
    quality = summary(scores)
    if not math.isfinite(scores.nats.mean()):
        return QualityAnswer(NoQuality("its predictions are not numbers"), file)
    checked, steps = CHECKED
    ids = torch.tensor(found[0].ids, device=plan.device)
    quality = dataclasses.replace(
        quality,
        model=stand_in,
        decoding=decode_check.check(plan, model, ids[:checked], steps),
        layers=_layers(plan, model, ids),
    )
    return QualityAnswer(quality, file)


def _layers(plan: Plan, model: Transformer, ids: Tensor) -> list[LayerSqnr] | None:
    """Each layer against full precision, where that is there and can be read again in seconds;
    none of a rank, which has only parts of layers."""
    if plan.split is not None:
        return None
    known = str(plan.spec) != "none" and not plan.checkpoint.saved
    if not known or plan.architecture.parameters() > READ_AGAIN:
        return None
    return sqnr_of_layers(plan, model, plan.config.checkpoint_path, ids)


def embedded(plan: Plan) -> tuple[Plan, Transformer]:
    """The plan and model of the same scheme, kernel and cache on the embedded model.

    Raises UsageError or KernelError where it cannot take them.
    """
    if plan.spec.scheme is None:
        raise UsageError(f"{plan.spec} chooses by a model's own layers")
    fields = RunConfig.__dataclass_fields__
    changes: dict[str, Any] = {name: fields[name].default for name in OF_THE_RUN}
    changes |= {"checkpoint_path": EMBEDDED_MODEL, "compile": False, "compile_prefill": False}
    plan = begin(make_plan(dataclasses.replace(plan.config, **changes)))
    loading = Loading(
        plan.config, plan.spec, plan.device, plan.tokenizer, plan.split, plan.checkpoint
    )
    return plan, loading.load(lambda done, total: None, lambda line: None)
