"""Train the embedded models, on the source of Python's standard library:

- tiny, a Llama of 6.4 M parameters;
- tiny_moe, a mixture of experts of 10.3 M parameters, of which a token uses 7.4 M.

    python -m quantbench.models.tiny.train                   # one to two hours on 2 cores with AMX
    python -m quantbench.models.tiny.train --model tiny_moe  # half an hour on one core
    python -m quantbench.models.tiny.train --minutes 9       # a piece; the next call goes on
    python -m quantbench.models.tiny.train --steps 20        # a try-out, into --output, too

The folders' config.json say what is trained. What comes out, in models/tiny/: model.safetensors
(bfloat16, Hugging Face names), tokenizer.model (sentencepiece, 4096 pieces), heldout.txt (whole
modules that no batch contained) and training.json (the curve and the final figures). Tests,
generated tables and the documentation dump are left out of the corpus: they would teach the model
tables instead of Python. tiny_moe has the same tokenizer, and linear layers in 8 bits, by
Qwen2-MoE's names.

The training of tiny_moe starts with tiny's weights (models/tiny_moe/upcycling.py) and has dropout:
tiny has seen the text for 8 epochs and knows it by heart. It needs 1.3 nats for a token of it, and
2.4 for one of the held-out text.

Everything random is seeded. The same CPython version (training.json names it) and the same torch
build give the same batches; floating-point sums may still differ between processors.
"""

import dataclasses
import io
import json
import lzma
import math
import platform
import shutil
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click
import sentencepiece
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from quantbench.cli import OneLineErrors
from quantbench.models.formats.compressed_tensors import packed
from quantbench.models.formats.names import hugging_face
from quantbench.models.llama import Attention, Transformer
from quantbench.models.loading import load_config, load_model
from quantbench.models.mixtral import MixtureOfExperts, Router
from quantbench.models.registry import build
from quantbench.models.tiny_moe.upcycling import upcycled

HERE = Path(__file__).parent
FOLDERS = HERE.parent  # of models
CONTEXT = 1024
BOS, EOS = 1, 2


@dataclass(frozen=True)
class Recipe:
    """How one of the models is trained."""

    steps: int
    rows: int  # sequences of CONTEXT tokens in a step
    matrices: float  # peak learning rates: of the layers' matrices,
    others: float  # and of all other weights
    dropout: float = 0.0  # of what attention and the feed-forward networks add to the residual
    balance: float = 0.0  # weight of the loss that keeps experts from dying out


RECIPES = {
    "tiny": Recipe(steps=3000, rows=8, matrices=0.01, others=3e-3),
    "tiny_moe": Recipe(300, 4, matrices=0.003, others=6e-4, dropout=0.15, balance=0.005),
}

# Whole modules of many kinds, none of which has a near twin elsewhere in the library.
HELD_OUT = (
    "asyncio/locks.py",
    "bdb.py",
    "calendar.py",
    "email/message.py",
    "heapq.py",
    "http/cookies.py",
    "shlex.py",
    "statistics.py",
    "textwrap.py",
)
SKIPPED_FOLDERS = {
    "test", "tests", "idle_test", "site-packages", "__phello__", "lib-dynload", "encodings",
    "pydoc_data",
}  # fmt: skip


def corpus() -> dict[str, str]:
    """Every module of the running Python's library that is written by hand, by relative path."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts) and not path.name.startswith("_sysconfig"):
            modules[relative.as_posix()] = path.read_text(encoding="utf-8", errors="replace")
    return modules


def train_tokenizer(texts: list[str]) -> bytes:
    """A sentencepiece BPE model that keeps every space and newline, so that text round-trips."""
    model = io.BytesIO()
    lines = (line for text in texts for line in text.splitlines() if line)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        model_type="bpe",
        vocab_size=load_config("tiny").vocab_size,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=False,
        user_defined_symbols=["\n"],
        character_coverage=0.9995,
        max_sentence_length=1 << 16,
        input_sentence_size=0,
        num_threads=2,
        minloglevel=2,
    )
    return model.getvalue()


def batches(
    documents: list[list[int]], steps: int, generator: torch.Generator, size: int
) -> Iterator[Tensor]:
    """Seeded epochs: modules shuffled, joined, cut from a random offset into CONTEXT + 1 tokens.
    Each batch is (size, CONTEXT + 1)."""
    rows: list[Tensor] = []
    for _ in range(steps):
        while len(rows) < size:
            order = torch.randperm(len(documents), generator=generator).tolist()
            stream = torch.tensor([token for index in order for token in documents[index]])
            offset = int(torch.randint(CONTEXT, (1,), generator=generator))
            count = (len(stream) - offset - 1) // CONTEXT
            cut = [stream[offset + i * CONTEXT :][: CONTEXT + 1] for i in range(count)]
            shuffle = torch.randperm(count, generator=generator).tolist()
            rows += [cut[index] for index in shuffle]
        yield torch.stack([rows.pop() for _ in range(size)])


def initialize(model: Transformer) -> None:
    """Normal weights of standard deviation 0.02, smaller where a layer adds to the residual."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            residual = name.endswith(("wo.weight", "w2.weight"))
            std = 0.02 / math.sqrt(2 * model.config.num_layers) if residual else 0.02
            nn.init.normal_(parameter, std=std)


def optimizers(model: Transformer, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embeddings, the head, the norms and, in a
    mixture of experts, the routers and gates."""
    named = dict(model.named_parameters())
    tables = [model.tok_embeddings.weight, model.output.weight]
    routers = [named[name] for name in named if name.endswith(("router.weight", "gate.weight"))]
    norms = [parameter for parameter in named.values() if parameter.ndim == 1]
    by_adam = {id(parameter) for parameter in (*tables, *routers, *norms)}
    by_muon = [parameter for parameter in named.values() if id(parameter) not in by_adam]
    return [
        torch.optim.Muon(by_muon, lr=recipe.matrices, weight_decay=0.1, adjust_lr_fn="original"),
        torch.optim.AdamW(
            [
                {"params": tables, "weight_decay": 0.1},
                {"params": [*norms, *routers], "weight_decay": 0.0},
            ],
            lr=recipe.others,
            betas=(0.9, 0.95),
        ),
    ]


def learning_rate(step: int, steps: int) -> float:
    """The fraction of the peak rate: a short warm-up, a plateau, a linear fall in the last half."""
    warmup = min(100, steps // 10 + 1)
    return min((step + 1) / warmup, 1.0, 2 * (steps - step) / steps)


# ---------------------------------------------------------------------------------- training


class Balance:
    """What the routers' inputs say of balance, collected during a forward pass."""

    def __init__(self, model: Transformer) -> None:
        self.terms: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._add)

    def _add(self, router: Router, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        scores = F.linear(inputs[0].float(), router.weight.float())
        probability = scores.softmax(-1).mean(0)
        count = len(router.weight)
        share = F.one_hot(output[0].flatten(), count).float().mean(0)
        self.terms.append(count * (probability * share).sum())

    def loss(self) -> Tensor:
        """Switch Transformer's (Fedus et al. 2021, https://arxiv.org/abs/2101.03961), the mean
        over layers: 1 where all experts are chosen equally often. 0 without experts."""
        terms, self.terms = self.terms, []
        return torch.stack(terms).mean() if terms else torch.zeros(())


def add_dropout(model: Transformer, share: float) -> None:
    """Drop elements of what the layers add to the residual stream, from now on in every pass."""
    for module in model.modules():
        if isinstance(module, Attention | MixtureOfExperts):
            module.register_forward_hook(lambda _module, _inputs, y: F.dropout(y, share))


def documents(output: Path | None) -> list[list[int]]:
    """The tokens of every module of Python's library but the held-out ones.

    output: a folder into which the held-out text and a tokenizer are written; None: those of tiny.
    """
    modules = corpus()
    held_out = "".join(modules.pop(name) for name in HELD_OUT)
    if output:
        output.mkdir(parents=True, exist_ok=True)
        (output / "heldout.txt").write_text(held_out)
        (output / "tokenizer.model").write_bytes(train_tokenizer(list(modules.values())))
    tokenizer = sentencepiece.SentencePieceProcessor(str((output or HERE) / "tokenizer.model"))
    return [[BOS, *tokenizer.encode(text), EOS] for text in modules.values()]


class Training:
    """A training that can be interrupted: `save` writes everything, and `Training` with the same
    arguments goes on from it."""

    def __init__(self, name: str, recipe: Recipe, seed: int, state: Path, output: Path) -> None:
        """state: the file that `save` writes. output: the folder of the result."""
        self.name, self.recipe, self.file, self.output = name, recipe, state, output
        self.step, self.seconds = 0, 0.0
        stored: dict[str, Any] = torch.load(state, weights_only=True) if state.exists() else {}
        self.curve: list[dict[str, float]] = stored.get("curve", [])
        config = load_config(name)
        mixture = config.mixture
        self.words = HERE if mixture else output  # the held-out text's and tokenizer's folder
        torch.manual_seed(seed)
        self.documents = stored.get("documents") or documents(None if mixture else output)
        generator = torch.Generator().manual_seed(seed)
        every = batches(self.documents, recipe.steps, generator, recipe.rows)
        if stored or not mixture:
            self.model = build(config)
            initialize(self.model)
        else:
            first = next(batches(self.documents, 1, torch.Generator().manual_seed(0), recipe.rows))
            self.model = upcycled(config, first[:, :-1])
        self.model.requires_grad_(True)
        self.balance = Balance(self.model)
        if recipe.dropout:
            add_dropout(self.model, recipe.dropout)
        self.optimizers = optimizers(self.model, recipe)
        self.peaks = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        if stored:
            self.model.load_state_dict(stored["model"])
            self.step, self.seconds = stored["step"], stored["seconds"]
            for optimizer, kept in zip(self.optimizers, stored["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
            torch.set_rng_state(stored["random"])
        self.batches = islice(every, self.step, None)
        # The hooks of a mixture are Python.
        self.cross_entropy = self._cross_entropy if mixture else torch.compile(self._cross_entropy)

    def _cross_entropy(self, rows: Tensor) -> Tensor:
        logits = self.model(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def loss(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The cross entropy of rows (B, CONTEXT + 1), and the routers' balance."""
        return self.cross_entropy(rows), self.balance.loss()

    def run(self, seconds: float) -> None:
        """Train until all steps are done or the time is over; every 250 steps export the model."""
        steps, started = self.recipe.steps, time.monotonic()
        for rows in self.batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss, balance = self.loss(rows)
            (loss + self.recipe.balance * balance).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            rate = learning_rate(self.step, steps)
            for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * rate
                optimizer.step()
                optimizer.zero_grad()
            self.step += 1
            if self.step % 10 == 0:
                click.echo(
                    f"step {self.step}/{steps} loss {loss.item():.3f} balance "
                    f"{balance.item():.3f} {time.monotonic() - started:.0f} s"
                )
            if self.step % 250 == 0 or self.step == steps:
                export(self.name, self.model, self.output)
                stored = load_model(str(self.output))
                bits = held_out_bits(stored, self.words)
                self.curve.append({"step": self.step, "loss": loss.item(), "bits_per_byte": bits})
                click.echo(f"step {self.step}/{steps} held-out bits per byte {bits:.4f}")
            if time.monotonic() - started > seconds:
                break
        self.seconds += time.monotonic() - started

    def save(self) -> None:
        content = {
            "step": self.step,
            "seconds": self.seconds,
            "curve": self.curve,
            "documents": self.documents,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "random": torch.get_rng_state(),
        }
        partial = self.file.with_suffix(".partial")
        torch.save(content, partial)
        partial.replace(self.file)


# ---------------------------------------------------------------------------------- the result


def held_out_bits(model: Transformer, words: Path = HERE) -> float:
    """Bits per byte of the held-out text in a folder, each token predicted from at least half a
    context."""
    text = (words / "heldout.txt").read_text()
    tokenizer = sentencepiece.SentencePieceProcessor(str(words / "tokenizer.model"))
    nats, half = 0.0, CONTEXT // 2
    stream = torch.tensor([BOS, *tokenizer.encode(text)])
    with torch.no_grad():
        for start in range(0, len(stream) - 1, half):
            begin = max(0, start - half)
            window = stream[begin : start + half + 1]
            logits = model(window[None, :-1])[0, start - begin :].float()
            nats += F.cross_entropy(logits, window[start - begin + 1 :], reduction="sum").item()
    return nats / math.log(2) / len(text.encode())


def export(name: str, model: Transformer, folder: Path) -> None:
    """Write the model `name` as a Hugging Face folder: model.safetensors and config.json.

    Linear layers are stored as config.json says: in bfloat16, as everything else, or in 8 bits with
    a scale for each row, in compressed-tensors' format (models/formats/compressed_tensors.py).
    """
    config = (FOLDERS / name / "config.json").read_text()
    linear = model.config.linear_shapes() if "quantization_config" in config else {}
    tensors = {}
    for key, parameter in model.state_dict().items():
        parts = hugging_face(key)
        for part, piece in zip(parts, parameter.chunk(len(parts)), strict=True):
            small = key.removesuffix(".weight") in linear
            stored = packed(piece) if small else {"": piece.to(torch.bfloat16).contiguous()}
            tensors |= {part + suffix: tensor for suffix, tensor in stored.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(config)


@click.command(cls=OneLineErrors)
@click.option("--model", "name", type=click.Choice(list(RECIPES)), default="tiny",
              show_default=True)  # fmt: skip
@click.option("--steps", type=click.IntRange(1),
              help="The rate falls over the second half. [3000; tiny_moe 300]")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--minutes", type=float, default=1e9, help="Stop after so many, to be resumed.")
@click.option("--output", type=click.Path(path_type=Path), help="[the model's own folder]")
@click.option("--state", type=click.Path(path_type=Path), help="To go on from. [MODEL.state]")
@click.option("--debug", is_flag=True, help="Show tracebacks")
def main(
    name: str,
    steps: int | None,
    seed: int,
    threads: int,
    minutes: float,
    output: Path | None,
    state: Path | None,
    debug: bool,
) -> None:
    """Train an embedded model anew, into --output."""
    torch.set_num_threads(threads)
    recipe = RECIPES[name]
    recipe = dataclasses.replace(recipe, steps=steps or recipe.steps)
    output, state = output or FOLDERS / name, state or Path(f"{name}.state")
    training = Training(name, recipe, seed, state, output)
    training.run(60 * minutes)
    if training.step < recipe.steps:
        training.save()
        click.echo(f"{training.step} of {recipe.steps} steps; the same command goes on")
        return
    if training.words != output:
        shutil.copyfile(training.words / "tokenizer.model", output / "tokenizer.model")
    held_out = (training.words / "heldout.txt").read_bytes()
    record = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": seed,
        "steps": recipe.steps,
        "tokens_per_step": recipe.rows * CONTEXT,
        "corpus_tokens": sum(map(len, training.documents)),
        "heldout_bytes": len(held_out),
        "heldout_modules": HELD_OUT,
        "xz_bits_per_byte": 8 * len(lzma.compress(held_out, preset=9)) / len(held_out),
        "bits_per_byte": training.curve[-1]["bits_per_byte"],
        "model_bytes": (output / "model.safetensors").stat().st_size,
        "seconds": round(training.seconds),
        "curve": training.curve,
    }
    (output / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    state.unlink(missing_ok=True)
    click.echo(f"done: {record['bits_per_byte']:.4f} bits per byte")


if __name__ == "__main__":
    main()
