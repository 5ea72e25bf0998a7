"""The full-precision model's hidden states, kept so that they are computed once.

They are in $XDG_CACHE_HOME/quantbench/logits (~/.cache/…), named by a hash of all they were made
from: the checkpoint's bytes, the texts, dtype, device, torch. A file holds the looks that some
scheme needed so far, and is replaced by one with more. It also has the noise floor: how far full
precision's decoding steps are from its prompts, which no quantized model can be expected to
undercut. Above MOST_BYTES, the least recently used files are removed.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path

import torch

from quantbench import files
from quantbench.errors import LogError
from quantbench.log.config import RunConfig
from quantbench.progress import progress, say
from quantbench.quality import decode_check, texts
from quantbench.quality.reference import Reference, read_on
from quantbench.run.loading import Loaded, load
from quantbench.run.plan import Plan, begin, make_plan

MOST_BYTES = 2_000_000_000  # 16,384 tokens of Llama 3 8B take 134 MB
FORMAT = 6
FLOOR_STEPS = 64


def full_plan(config: RunConfig) -> Plan:
    """A plan for the config's model in full precision."""
    unquantized = {"quantization": "none", "kernel": "auto", "kv_cache": "dense"}
    full = dataclasses.replace(config, **unquantized, kv_cache_quantization=False)  # type: ignore
    return begin(make_plan(full))


def reference(config: RunConfig, text: str | None, tokens: int, looks: int) -> Reference:
    """The config's model in full precision on the first `looks` looks, or on more.

    text, tokens: as Texts has them. Raises LogError where they cannot be kept.
    """
    plan = full_plan(config)
    folder = files.cache_folder() / "logits"
    path = folder / f"{content_hash(plan, text, tokens)}.safetensors"
    kept = None
    with contextlib.suppress(OSError, ValueError):
        kept = Reference.read(path)
        os.utime(path)
    if kept and (kept.about.whole or kept.about.looks >= looks):
        say(f"Full precision: an earlier run stored its hidden states in {path}")
        return kept
    read = texts.Texts(plan, text, tokens)
    model = loaded(plan).model
    with progress("Full precision: reading", unit="tokens") as report:
        made = read_on(plan, model, read, looks, kept, report)
    if made.about.noise_floor is None:
        _, floor = decode_check.both_ways(plan, model, made.passages[0].ids, FLOOR_STEPS)
        made = Reference(dataclasses.replace(made.about, noise_floor=floor), made.hidden)
    refused = "cannot keep hidden states in"
    with files.named(refused, folder, LogError):
        folder.mkdir(parents=True, exist_ok=True)
        files.replace(refused, path, made.write)
        discard_old(folder)
    return made


def loaded(plan: Plan) -> Loaded:
    """The plan's model, with progress while it is loaded."""
    with progress(f"Loading {plan.name} as {plan.spec.name} in {plan.config.precision}") as report:
        return load(plan, report, say)


def content_hash(plan: Plan, text: str | None, tokens: int) -> str:
    """A hash of everything that the hidden states depend on."""
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
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode())
    for path in plan.checkpoint.files:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()[:32]


def discard_old(folder: Path) -> None:
    """Remove the least recently used files until the folder holds no more than MOST_BYTES; the
    newest stays in any case. A run that has opened one can go on reading."""
    found, total = [], 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another run may remove it meanwhile
            found.append((path.stat(), path))
    for number, (about, path) in enumerate(sorted(found, key=lambda pair: -pair[0].st_mtime)):
        total += about.st_size
        if number and total > MOST_BYTES:
            path.unlink(missing_ok=True)
