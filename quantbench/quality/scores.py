"""How well a model still predicts, and how far its predictions are from a reference's.

    full = read_on(plan, model, Texts(plan, None, 4096), looks=1)
    summary(score(other_plan, other_model, full))

Passages go through the model in a KV cache of the arm's own kind, so that the error of a quantized
cache counts as well. The reference's final hidden states are kept, one tensor (n, D) a passage, in
the model's own dtype, so that nothing is lost. Its own head runs over them again: that takes the
vocabulary's share of the model's width less than logits.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.generate import Generator
from quantbench.kv_cache.base import LayerMemory
from quantbench.models.llama import Transformer
from quantbench.progress import Report
from quantbench.quality import texts
from quantbench.quality.block_errors import Estimate, block_mean, mean_of, ratio
from quantbench.quality.texts import Passage, Texts
from quantbench.quality.thresholds import FIRST_TOKENS, settled
from quantbench.quality.types import Part, Quality
from quantbench.run.plan import Plan

CHUNK, ROWS = 512, 64  # tokens that are read at once; rows of logits in float64 at once
BLOCK, BLOCKS = 32, 12  # tokens, which depend on each other, at most; blocks of each text, at least
FAR = 2.0  # times the limit of the KL
OF_TEXTS = 0.5  # share of the error below which reading more of the same texts is in vain
DEPTHS = (("0-1k", 0), ("1-8k", 1024), ("8-32k", 8192), ("32k+", 32768), ("", 1 << 62))


class Reader:
    """Reads passages through a KV cache of the plan's kind."""

    def __init__(self, plan: Plan, model: Transformer) -> None:
        self.plan, self.model = plan, model
        self.size, self.caches = 0, list[LayerMemory]()

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
class Reference:
    """What a model read, its final hidden states on it, and its head."""

    passages: list[Passage]
    hidden: list[Tensor]  # (n, D) of each passage, on the CPU
    head: Callable[[Tensor], Tensor]  # logits (1, n, V) from hidden states (1, n, D)
    vocab_size: int
    looks: int  # that were read
    whole: bool  # whether there is no more to read


def head_of(model: Transformer) -> Callable[[Tensor], Tensor]:
    """The model's last steps alone, so that its layers can be freed."""
    head = copy.copy(model)
    head._modules = dict(model._modules)
    head.layers, head.tok_embeddings = nn.ModuleList(), nn.Embedding(0, 0)
    return head.logits


@torch.no_grad()
def read_on(
    plan: Plan,
    model: Transformer,
    texts: Texts,
    looks: int,
    before: Reference | None = None,
    report: Report = lambda done, total: None,
) -> Reference:
    """The plan's model on the first `looks` looks, of which `before` has some."""
    passages, states = (list(before.passages), list(before.hidden)) if before else ([], [])
    reader, look = Reader(plan, model), before.looks if before else 0
    whole = before is not None and before.whole
    while look < looks and not whole:
        for passage in texts.look(look, model):
            passages.append(passage)
            states.append(reader.hidden(passage).cpu())
            report(sum(map(len, states)), FIRST_TOKENS << look)
        whole, look = texts.last(look), look + 1
    head = before.head if before else head_of(model)
    return Reference(passages, states, head, plan.architecture.vocab_size, look, whole)


def compared(logits: Tensor, reference: Tensor | None, targets: Tensor) -> dict[str, Tensor]:
    """How logits (n, V) predict the tokens `targets` (n,), and differ from a reference's logits:
    rows (n,), float64 on the CPU."""
    device = "cpu" if logits.device.type == "mps" else logits.device  # mps has no float64
    logits, targets = logits.to(device), targets.to(device)
    q = logits.double().log_softmax(-1)
    rows = {"nats": F.nll_loss(q, targets, reduction="none")}  # negative log-likelihood
    if reference is not None:
        p = reference.to(device).double().log_softmax(-1)
        five, own = reference.to(device).topk(5).indices, logits.topk(5).indices
        rows |= {
            "reference_nats": F.nll_loss(p, targets, reduction="none"),
            "kl": (p.exp() * (p - q)).sum(-1),  # KL(reference ‖ model), nats
            "top1": five[:, 0] == own[:, 0],
            "top5": (five[:, :, None] == own[:, None]).any(-1).double().mean(-1),
            "right": own[:, 0] == targets,  # whether the likeliest token is the text's
            "reference_right": five[:, 0] == targets,
        }
    return {name: row.double().cpu() for name, row in rows.items()}


@dataclass(frozen=True)
class Scores:
    """Predictions of passages. Each row, (N,) float64 on the CPU, has a number for each token;
    `compared` names and defines them."""

    passages: list[Passage]
    rows: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.rows[name]

    def __add__(self, other: "Scores") -> "Scores":
        return Scores(self.passages + other.passages, _joined([self.rows, other.rows]))

    def texts(self) -> dict[str, Tensor]:
        """Which tokens (N,) are of each text."""
        names = [part.text for part in self.passages for _ in range(part.predicted)]
        return {n: torch.tensor([name == n for name in names]) for n in dict.fromkeys(names)}

    def depths(self) -> Tensor:
        """Each token's position in its passage."""
        return torch.cat([torch.arange(part.first, len(part.ids)) for part in self.passages])

    def estimate(self, values: Tensor, chosen: Tensor | None = None) -> Estimate:
        """The mean of values (N,), of the chosen tokens (N,) if given, from blocks of them."""
        chosen = torch.ones(len(values)).bool() if chosen is None else chosen
        size = max(1, min(BLOCK, int(chosen.sum()) // BLOCKS))
        pairs = torch.stack([values.where(chosen, 0.0), chosen.double()])
        parts = torch.split(pairs, self._counts(), 1)
        blocks = torch.stack([b.sum(1) for part in parts for b in torch.split(part, size, 1)])
        sums, counts = blocks[blocks[:, 1] > 0].T.tolist()
        return block_mean(sums, counts)

    def mean_kl(self, between: bool = True) -> Estimate:
        """The mean divergence, each text counting alike. between: with what texts differ by, where
        that is more than their own errors explain."""
        parts = [self.estimate(self["kl"], own) for own in self.texts().values()]
        return mean_of(parts, between)

    def enough(self, max_kl: float) -> bool:
        """Whether more tokens of these texts cannot tell on which side of the limit the KL is: it
        is clear of it, its error is what the texts differ by, or it is no number."""
        kl, within = self.mean_kl(), self.mean_kl(between=False)
        return (
            not math.isfinite(kl.mean)
            or settled(kl.mean, kl.standard_error, max_kl)
            or within.standard_error < OF_TEXTS * kl.standard_error
        )

    def is_far_above(self, max_kl: float) -> bool:
        """Whether the KL is beyond doubt FAR times above the limit."""
        kl = self.mean_kl()
        return kl.mean > FAR * max_kl and settled(kl.mean, kl.standard_error, FAR * max_kl)

    def bits_per_byte(self) -> float | None:
        """Bits per byte of the texts that no model wrote."""
        nats = torch.split(self["nats"], self._counts())
        known = [(n, part.bytes) for n, part in zip(nats, self.passages, strict=True) if part.bytes]
        size = sum(count for _, count in known)
        return sum(n.sum().item() for n, _ in known) / math.log(2) / size if size else None

    def _counts(self) -> list[int]:
        return [part.predicted for part in self.passages]


@torch.no_grad()
def score(
    plan: Plan,
    model: Transformer,
    full: Reference,
    max_kl: float | None = None,
    before: Scores | None = None,
    report: Report = lambda done, total: None,
    own: bool = False,
    hopeless: bool = False,
) -> Scores:
    """Predict the passages of `full`, look after look, until the KL is clear of `max_kl`.

    before: scores of its first looks. report: called as (tokens done, total). own: the hidden
    states are the model's own, which are not computed again and compared with nothing. hopeless:
    stop after any passage where the KL is FAR times above `max_kl` beyond doubt.
    """
    reader, head = Reader(plan, model), None if own else full.head
    scores, start = before, len(before.passages) if before else 0
    later = list(enumerate(full.passages))[start:]
    done, total = 0, sum(passage.predicted for _, passage in later)
    for _, look in groupby(later, lambda pair: pair[1].look):
        for number, passage in look:
            states, targets = full.hidden[number], torch.tensor(passage.ids[passage.first :])
            x = states.to(plan.device) if own else reader.hidden(passage)
            pieces = zip(*(torch.split(part, ROWS) for part in (x, states, targets)), strict=True)
            rows = [
                compared(
                    model.logits(q[None])[0],
                    head(p[None].to(plan.device))[0] if head else None,
                    ids,
                )
                for q, p, ids in pieces
            ]
            found = Scores([passage], _joined(rows))
            scores = scores + found if scores else found
            done += passage.predicted
            report(done, total)
            if hopeless and max_kl is not None and scores.is_far_above(max_kl):
                return scores
        assert scores is not None
        if max_kl is not None and not own and scores.enough(max_kl):
            break
    assert scores is not None
    return scores


def _joined(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in rows]) for name in rows[0]}


def summary(scores: Scores) -> Quality:
    """The figures with their standard errors. `with_interval` adds intervals, which take scipy."""
    mean = scores.estimate(scores["nats"])
    perplexity = ratio(mean.mean)
    quality = Quality(
        len(scores["nats"]),
        perplexity,
        None if mean.known_error is None else perplexity * mean.known_error,
        bits_per_byte=scores.bits_per_byte(),
        window=max(len(part.ids) - 1 for part in scores.passages),
    )
    if "kl" not in scores.rows:
        return quality
    difference, kl = scores.estimate(scores["nats"] - scores["reference_nats"]), scores.mean_kl()
    error, top1 = difference.known_error, scores.estimate(scores["top1"])
    depths = scores.depths()
    by_depth = [(name, (depths >= low) & (depths < high))
                for (name, low), (_, high) in pairwise(DEPTHS)]  # fmt: skip
    digests = {name: texts.digest([part for part in scores.passages if part.text == name])
               for name in scores.texts()}  # fmt: skip
    return dataclasses.replace(
        quality,
        perplexity_ratio=ratio(difference.mean),
        perplexity_ratio_standard_error=None if error is None else ratio(difference.mean) * error,
        perplexity_ratio_freedom=None if error is None else difference.freedom,
        kl=max(kl.mean, 0.0),  # rounding can leave it a little below; NaN stays NaN
        kl_standard_error=kl.known_error,
        kl_freedom=None if kl.known_error is None else kl.freedom,
        kl_median=scores["kl"].median().item(),
        kl_p99=scores["kl"].quantile(0.99).item(),
        kl_max=scores["kl"].max().item(),
        top1=top1.mean,
        top1_standard_error=top1.known_error,
        top1_freedom=None if top1.known_error is None else top1.freedom,
        top5=scores["top5"].mean().item(),
        lost=(scores["reference_right"] * (1 - scores["right"])).mean().item(),
        gained=(scores["right"] * (1 - scores["reference_right"])).mean().item(),
        texts=[_part(n, scores, own, digests[n]) for n, own in scores.texts().items()],
        depths=[_part(name, scores, chosen) for name, chosen in by_depth if chosen.any()],
    )


def _part(name: str, scores: Scores, chosen: Tensor, digest: str | None = None) -> Part:
    kl, nats = scores.estimate(scores["kl"], chosen), scores["nats"] - scores["reference_nats"]
    return Part(
        name=name,
        tokens=int(chosen.sum()),
        kl=max(kl.mean, 0.0),
        kl_standard_error=kl.known_error,
        top1=scores["top1"][chosen].mean().item(),
        perplexity_ratio=ratio(nats[chosen].mean().item()),
        digest=digest,
    )
