"""How well an arm still predicts, and how far its predictions are from a reference's.

The text goes through the model in windows that fill a KV cache of the arm's own kind, so that the
error of a quantized cache counts as well. The reference's logits are kept in a file in the model's
own dtype: nothing is lost.
"""

import dataclasses
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantbench import files
from quantbench.compare.fidelity import decode_check
from quantbench.compare.fidelity.defaults import CONTEXT, EMBEDDED_MODEL
from quantbench.compare.fidelity.layer_sqnr import sqnr_of_layers
from quantbench.compare.figures import block_errors
from quantbench.compare.figures.block_errors import block_mean
from quantbench.compare.sampling.answers import (
    LayerSqnr,
    LogitsFile,
    NoQuality,
    Quality,
    QualityAnswer,
)
from quantbench.errors import KernelError, UsageError
from quantbench.generate import Generator
from quantbench.log.config import RunConfig
from quantbench.models.formats import EMBEDDED
from quantbench.models.llama import Transformer
from quantbench.run.checks import EXPERTS
from quantbench.run.loading import Loading
from quantbench.run.plan import Plan, begin, make_plan
from quantbench.run.scoring import perplexity, predictions

READ_AGAIN = 1.5e9  # parameters at most: a checkpoint of 3 GB
CHECKED = (65, 16)  # a window of 65 tokens is read both ways, its last 16 by steps: 1 or 2 s
# Options of a run that concern its speed alone or the work it does, not what it predicts.
OF_THE_RUN = (
    *("num_layers", "prompt", "prefill_size", "context_depth", "cache_size", "batch_size"),
    *("max_new_tokens", "save", "expert_memory", *EXPERTS),
)


@dataclass(frozen=True)
class Scores:
    """One number a token, each (N,) on the CPU. Without a reference there is only `nats`."""

    windows: list[int]  # tokens of each; they add up to N
    nats: Tensor  # negative log-likelihood by the model
    reference_nats: Tensor | None = None  # by the reference
    kl: Tensor | None = None  # KL(reference ‖ model) in nats
    top1: Tensor | None = None  # 1 where the likeliest tokens are the same
    top5: Tensor | None = None  # share of the reference's five likeliest among the model's

    def sums(self, values: Tensor) -> list[float]:
        """Sums of values (N,) over each window."""
        return [part.sum().item() for part in torch.split(values, self.windows)]


class Logits:
    """Logits (N, V) in a file, written or read from the front."""

    def __init__(self, file: LogitsFile) -> None:
        """Open a file that exists."""
        self.file = file
        count, dtype = file.rows * file.vocab_size, getattr(torch, file.dtype)
        values = torch.from_file(file.path, shared=True, size=count, dtype=dtype)
        self.values = values.view(file.rows, file.vocab_size)
        self.row = 0

    @classmethod
    def create(cls, file: LogitsFile) -> "Logits":
        """A new file. Raises OSError where the disk is full: writing to a mapped file would end
        the process with SIGBUS instead."""
        with open(file.path, "wb") as opened:
            size = file.rows * file.vocab_size * getattr(torch, file.dtype).itemsize
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(opened.fileno(), 0, size)
        return cls(file)

    def next(self, count: int) -> Tensor:
        """The next rows (count, V): to read, or to copy into."""
        self.row += count
        return self.values[self.row - count : self.row]


def score(
    windows: Iterator[tuple[Tensor, Tensor]], reference: Logits | None, keep: Logits | None = None
) -> Scores:
    """windows: what scoring.predictions gives. keep: gets a copy of the logits."""
    names = [name for name in Scores.__dataclass_fields__ if name != "windows"]
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for logits, targets in windows:
        logits, targets = logits.cpu(), targets.cpu()
        if keep:
            keep.next(len(logits)).copy_(logits)
        q = logits.double().log_softmax(-1)
        rows["nats"].append(F.nll_loss(q, targets, reduction="none"))
        if reference:
            full = reference.next(len(logits)).double()
            p = full.log_softmax(-1)
            rows["reference_nats"].append(F.nll_loss(p, targets, reduction="none"))
            rows["kl"].append((p.exp() * (p - q)).sum(-1))
            five, own = full.topk(5).indices, logits.topk(5).indices
            rows["top1"].append((five[:, 0] == own[:, 0]).double())
            rows["top5"].append((five[:, :, None] == own[:, None]).any(-1).double().mean(-1))
    counts = [len(part) for part in rows["nats"]]
    return Scores(counts, **{name: torch.cat(parts) for name, parts in rows.items() if parts})


def summary(scores: Scores) -> Quality:
    """The figures with their standard errors, from windows as blocks, and the interval of the ratio
    of perplexities."""
    return without_interval(scores).with_interval()


def without_interval(scores: Scores) -> Quality:
    """`summary` but for the interval, which takes scipy. The standard error of the ratio is from
    the differences of paired tokens."""
    nats = scores.nats
    mean = perplexity(nats)
    quality = Quality(len(nats), mean, _times(mean, standard_error(scores, nats)))
    if scores.kl is None:
        return quality
    assert scores.reference_nats is not None
    assert scores.top1 is not None and scores.top5 is not None
    difference = block_mean(scores.sums(nats - scores.reference_nats), scores.windows)
    ratio, error = block_errors.ratio(difference.mean), difference.standard_error
    known = math.isfinite(error)
    return dataclasses.replace(
        quality,
        perplexity_ratio=ratio,
        perplexity_ratio_standard_error=ratio * error if known else None,
        perplexity_ratio_freedom=difference.freedom if known else None,
        kl=scores.kl.mean().clamp(min=0).item(),  # rounding can leave it a little below
        kl_standard_error=standard_error(scores, scores.kl),
        kl_median=scores.kl.median().item(),
        kl_p99=scores.kl.quantile(0.99).item(),
        kl_max=scores.kl.max().item(),
        top1=scores.top1.mean().item(),
        top5=scores.top5.mean().item(),
    )


def standard_error(scores: Scores, values: Tensor) -> float | None:
    """The standard error of the mean of `values` (N,), which holds one value for each token.

    Tokens of one window depend on each other, so the error is taken from the windows' means. None
    where there are too few windows.
    """
    error = block_mean(scores.sums(values), scores.windows).standard_error
    return error if math.isfinite(error) else None


def _times(value: float, error: float | None) -> float | None:
    return None if error is None else value * error


def quick(
    plan: Plan,
    model: Transformer,
    limit: int,
    text: str | None,
    reference: LogitsFile | None,
    keep: str | None,
) -> QualityAnswer:
    """`without_interval` over the first `limit` tokens of a text, and a check of decoding.

    A model of random weights is replaced by the embedded one in the same scheme.
    reference: the baseline's logits. keep: a path for the logits of this model, which the answer
    then describes.
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
    ids = token_ids(plan, limit, text).to(plan.device)
    vocab_size = plan.architecture.vocab_size
    if reference and (reference.rows, reference.vocab_size) != (len(ids) - 1, vocab_size):
        return QualityAnswer(NoQuality("the baseline has another tokenizer"))
    file = LogitsFile(keep, len(ids) - 1, vocab_size, plan.config.precision) if keep else None
    context = window(plan, limit)
    scores = score(
        through_cache(plan, model, ids, context),
        Logits(reference) if reference else None,
        Logits.create(file) if file else None,
    )
    if not math.isfinite(perplexity(scores.nats)):
        return QualityAnswer(NoQuality("its predictions are not numbers"), file)
    tokens, steps = CHECKED
    quality = dataclasses.replace(
        without_interval(scores),
        window=context,
        model=stand_in,
        decoding=decode_check.check(plan, model, ids[:tokens], steps),
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


def window(plan: Plan, limit: int) -> int:
    """Positions of a window, for so many tokens; 0: for all there are. At most half of the tokens,
    so that at least four windows count, which an interval takes."""
    return max(2, min(CONTEXT, plan.architecture.max_position, limit // 2 or CONTEXT))


def through_cache(
    plan: Plan, model: Transformer, ids: Tensor, context: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """scoring.predictions through a cache of the kind that the plan asks for."""
    generator = Generator(model, 1, context, plan.kv_cache, prefill_chunk=context)
    return predictions(generator.forward, ids, context)


def token_ids(plan: Plan, limit: int, text: str | None) -> Tensor:
    """The beginning of the text, `limit` tokens and one to begin with; 0: all of it.

    UsageError where it cannot be read, does not fill a window, or for a limit of one token.
    """
    if limit == 1:
        raise UsageError(
            "--tokens 1: a prompt and a decoding step behind it take 2; give 2 or more, or 0 for "
            "the whole text"
        )
    path = Path(text or EMBEDDED / "heldout.txt")
    ids = plan.tokenizer.encode(files.read_text("--text", path))
    least = window(plan, limit)
    if len(ids) <= least:
        raise UsageError(
            f"--text {path}: {len(ids)} tokens do not fill a window of {least}; give a longer "
            "text, or fewer --tokens"
        )
    return torch.tensor(ids[: limit + 1] if limit else ids)
