"""The full-precision model's hidden states, kept so that they are computed once.

They are in $XDG_CACHE_HOME/quantbench/logits (~/.cache/…), named by a hash of all they were made
from: the checkpoint's bytes, the texts, dtype, device, torch. A file holds the looks that some
scheme needed so far, and is replaced by one with more. It also has the noise floor: how far the
same model in another dtype is from it, which no quantized model can be expected to undercut. Above
MOST_BYTES, the least recently used files are removed.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from quantbench import files
from quantbench.errors import LogError
from quantbench.log.config import RunConfig
from quantbench.progress import Report, can_erase, progress, say
from quantbench.quality import texts
from quantbench.quality.reference import Reference
from quantbench.quality.scores import Reader, score, summary
from quantbench.quality.types import Quality
from quantbench.run.loading import Loaded, load
from quantbench.run.plan import Plan, begin, make_plan

MOST_BYTES = 2_000_000_000  # 16,384 tokens of Llama 3 8B take 134 MB
SCRATCH = "unfinished-"
FORMAT = 5
OTHER_DTYPE = {"bfloat16": "float32", "float16": "float32", "float32": "bfloat16"}


def reference(config: RunConfig, text: str | None, tokens: int, looks: int) -> Reference:
    """The config's model in full precision on the first `looks` looks, or on more.

    text, tokens: as for texts.passages. Raises LogError where they cannot be kept.
    """
    full = dataclasses.replace(
        config, quantization="none", kernel="auto", kv_cache="dense", kv_cache_quantization=False
    )
    plan = begin(make_plan(full))
    folder = files.cache_folder() / "logits"
    path = folder / f"{content_hash(plan, text, tokens)}.safetensors"
    kept = None
    with contextlib.suppress(OSError, ValueError):
        kept = Reference(path)
        os.utime(path)
    if kept and (kept.whole or kept.looks >= looks):
        say(f"Full precision: kept by an earlier run, {path}")
        return kept
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=SCRATCH) as scratch:
            made = Path(scratch, "made")
            _make(plan, text, tokens, looks, kept, made)
            os.replace(made, path)
        discard_old(folder)
        return Reference(path)
    except OSError as error:
        reason = error.strerror or error
        raise LogError(f"cannot keep hidden states in {folder}: {reason}") from None


@contextlib.contextmanager
def phase(what: str, unit: str = "tokens") -> Iterator[Report]:
    """Show `what` and how far it is; where no line can be erased, once."""
    if can_erase():
        with progress(what, lasting=False, unit=unit) as report:
            yield report
    else:
        say(f"{what} …")
        yield lambda done, total: None


def loaded(plan: Plan) -> Loaded:
    """The plan's model, with progress while it is loaded."""
    with phase(f"Loading {plan.name} as {plan.spec} in {plan.config.precision}", "GB") as report:
        return load(plan, report, say)


@torch.no_grad()
def _make(
    plan: Plan, text: str | None, tokens: int, looks: int, kept: Reference | None, path: Path
) -> None:
    """Write the first `looks` looks to `path`, of which `kept` has some."""
    model = functools.cache(lambda: loaded(plan).model)

    def write() -> tuple[list[texts.Written], list[texts.Written]]:
        model()
        with phase("Full precision: writing a text") as report:
            return texts.written(plan, model(), report)

    passages = kept.about.passages if kept else texts.passages(plan, text, tokens, write)
    floor = kept.about.noise_floor if kept else None
    hidden: list[Tensor] = [kept.hidden(passage) for passage in kept.read] if kept else []
    missing = [passage for passage in passages if passage.look < looks][len(hidden) :]
    reader, total = Reader(plan, model()), sum(passage.predicted for passage in missing)
    with phase("Full precision: reading") as report:
        for passage in missing:
            hidden.append(reader.hidden(passage).cpu())
            report(sum(map(len, hidden)), total)
    Reference.write(path, plan, passages, hidden, floor)
    if floor is None:
        del model, write, reader  # before the other one is loaded
        Reference.write(path, plan, passages, hidden, _noise_floor(plan, Reference(path)))


def _noise_floor(plan: Plan, full: Reference) -> Quality:
    """Of the first look alone."""
    other = dataclasses.replace(plan.config, precision=OTHER_DTYPE[plan.config.precision])
    plan = begin(make_plan(other))
    first = [passage for passage in full.read if passage.look == 0]
    return summary(score(plan, loaded(plan).model, first, full))


def content_hash(plan: Plan, text: str | None, tokens: int) -> str:
    """A hash of everything that the hidden states depend on."""
    digest = hashlib.blake2b(digest_size=16)
    facts = {
        "format": FORMAT,
        "architecture": dataclasses.asdict(plan.architecture),
        "precision": plan.config.precision,
        "device": str(plan.device),
        "torch": torch.__version__,
        "texts": texts.source(plan, text),
        "opening": plan.tokenizer.encode("a"),
        "template": plan.tokenizer.chat_template,
        "tokens": tokens,
    }
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for path in plan.checkpoint.files:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def discard_old(folder: Path) -> None:
    """Remove the least recently used files until the folder holds no more than MOST_BYTES; the
    newest stays in any case. A run that has opened one can go on reading.

    Unfinished files of a killed run are removed after a day.
    """
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another run may remove it meanwhile
            found.append((path.stat(), path))
    total = 0
    kept = (pair for pair in found if not pair[1].name.startswith(SCRATCH))
    for number, (about, path) in enumerate(sorted(kept, key=lambda pair: -pair[0].st_mtime)):
        total += about.st_size
        if number and total > MOST_BYTES:
            path.unlink(missing_ok=True)
    for about, path in found:
        if path.name.startswith(SCRATCH) and about.st_mtime < time.time() - 86400:
            shutil.rmtree(path, ignore_errors=True)
