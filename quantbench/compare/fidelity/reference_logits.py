"""The full-precision model's logits on a text, kept so that they are computed once.

They are in $XDG_CACHE_HOME/quantbench/logits (~/.cache/…), named by a hash of all they were made
from: the checkpoint's bytes, the tokens, dtype, device, torch. They are kept in the model's own
dtype, so nothing is lost. A JSON file next to them has the noise floor: how far the same model in
another dtype is from them, which no quantized model can be expected to undercut. Above MOST_BYTES,
the least recently used are removed.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantbench import files
from quantbench.compare.fidelity.scores import Logits, score, summary, through_cache
from quantbench.compare.sampling.answers import LogitsFile, Quality
from quantbench.errors import LogError
from quantbench.log.config import RunConfig
from quantbench.run.loading import load
from quantbench.run.plan import Plan, begin, make_plan
from quantbench.typed_json import from_json, to_json

MOST_BYTES = 8_000_000_000  # 4096 tokens of Llama 3, whose vocabulary is large, take 1 GB
SCRATCH = "unfinished-"
FORMAT = 4  # of the JSON next to the logits
OTHER_DTYPE = {"bfloat16": "float32", "float16": "float32", "float32": "bfloat16"}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Reference:
    """Where the logits are, and the quality of the model in another dtype against them."""

    logits: LogitsFile
    quality: Quality  # of the model itself: its perplexity
    noise_floor: Quality
    other_dtype: str

    def open(self) -> Logits:
        return Logits(self.logits)


@dataclass(frozen=True)
class Kept:
    """The JSON next to the logits."""

    bytes: int  # of the file of logits
    reference: Reference


def reference(config: RunConfig, ids: Tensor, context: int, say: Say) -> Reference:
    """The config's model in full precision, over windows of `context` tokens.

    Raises LogError where the logits cannot be kept.
    """
    full = dataclasses.replace(
        config, quantization="none", kernel="auto", kv_cache="dense", kv_cache_quantization=False
    )
    plan = begin(make_plan(full))
    folder = files.cache_folder() / "logits"
    key = content_hash(plan, ids, context)
    about, logits = folder / f"{key}.json", folder / f"{key}.logits"
    try:
        kept = from_json(Kept, json.loads(about.read_text()))
        if logits.stat().st_size == kept.bytes:
            say(f"Full precision: logits of an earlier run, {logits}")
            with contextlib.suppress(OSError):
                os.utime(logits)
            return _at(logits, kept.reference)
    except (OSError, ValueError):
        pass
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=SCRATCH) as scratch:
            made = _make(plan, ids, context, f"{scratch}/logits", say)
            size = os.path.getsize(f"{scratch}/logits")
            made = _at(logits, made)
            os.replace(f"{scratch}/logits", logits)
            Path(scratch, "about").write_text(json.dumps(to_json(Kept(size, made))))
            os.replace(f"{scratch}/about", about)  # last: marks the logits as complete
        discard_old(folder)
    except OSError as error:
        raise LogError(f"cannot keep logits in {folder}: {error.strerror}") from None
    return made


def _at(path: Path, reference: Reference) -> Reference:
    """The same, whose logits lie at `path`."""
    logits = dataclasses.replace(reference.logits, path=str(path))
    return dataclasses.replace(reference, logits=logits)


def discard_old(folder: Path) -> None:
    """Remove the least recently used logits until the folder holds no more than MOST_BYTES; the
    newest stay in any case. A run that has opened them can go on reading.

    Unfinished files of a killed run are removed after a day.
    """
    total = 0
    for number, (path, about) in enumerate(_newest_first(folder, "*.logits")):
        total += about.st_size
        if number and total > MOST_BYTES:
            path.with_suffix(".json").unlink(missing_ok=True)  # first: marks the logits as complete
            path.unlink(missing_ok=True)
    for path, about in _newest_first(folder, f"{SCRATCH}*"):
        if about.st_mtime < time.time() - 86400:
            shutil.rmtree(path, ignore_errors=True)


def _newest_first(folder: Path, pattern: str) -> list[tuple[Path, os.stat_result]]:
    paths = []
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # another run may remove it meanwhile
            paths.append((path, path.stat()))
    return sorted(paths, key=lambda pair: -pair[1].st_mtime)


def _make(plan: Plan, ids: Tensor, context: int, path: str, say: Say) -> Reference:
    vocab_size, precision = plan.architecture.vocab_size, plan.config.precision
    file = LogitsFile(path, len(ids) - 1, vocab_size, precision)
    say(f"Full precision in {precision} …")
    model = load(plan, lambda done, total: None, say).model
    scores = score(through_cache(plan, model, ids, context), None, Logits.create(file))
    del model  # before the next one is loaded
    other = dataclasses.replace(plan.config, precision=OTHER_DTYPE[precision])
    say(f"Full precision in {other.precision}, for the noise floor …")
    plan = begin(make_plan(other))
    model = load(plan, lambda done, total: None, say).model
    floor = summary(score(through_cache(plan, model, ids, context), Logits(file)))
    return Reference(file, summary(scores), floor, other.precision)


def content_hash(plan: Plan, ids: Tensor, context: int) -> str:
    """A hash of everything that the logits depend on."""
    digest = hashlib.blake2b(digest_size=16)
    facts = {
        "format": FORMAT,
        "architecture": dataclasses.asdict(plan.architecture),
        "precision": plan.config.precision,
        "device": str(plan.device),
        "torch": torch.__version__,
        "context": context,
    }
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    digest.update(ids.cpu().numpy().tobytes())
    for path in plan.checkpoint.files:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()
