"""Train the embedded mixture of experts: 10.3 M parameters, of which a token uses 7.4 M.

    python -m quantbench.models.tiny_moe.train                     # half an hour on one core
    python -m quantbench.models.tiny_moe.train --minutes 9   # a piece; the next call goes on
    python -m quantbench.models.tiny_moe.train --steps 20    # a try-out, into --output, too

What comes out, in models/tiny_moe/: model.safetensors (linear layers in 8 bits, the rest in
bfloat16, Qwen2-MoE's names), config.json, the tokenizer and training.json. Text, tokenizer and
held-out modules are those of the embedded model, models/tiny.

The training begins with the embedded model's weights ("sparse upcycling": Komatsuzaki et al. 2022,
https://arxiv.org/abs/2212.05055). Its feed-forward network becomes the expert that all tokens
share. Beside it each layer gets 8 experts, of which a token takes two:

- The layer's inputs, for some text, are put into 8 clusters by k-means. The router begins with the
  clusters' centers, so at first an expert gets the tokens of one kind.
- An expert begins with the 128 neurons of the network that are most active on its own tokens, as in
  MoEfication (Zhang et al. 2022, https://arxiv.org/abs/2110.01786). Their weights of the second
  matrix begin at zero, so at first the model computes exactly what the embedded model computes.

Then everything is trained on the same text, with dropout: the embedded model has seen that text for
8 epochs and knows it by heart. It needs 1.3 nats for a token of it, and 2.4 for one of the held-out
text. Everything random is seeded.
"""

import dataclasses
import json
import math
import platform
import shutil
import time
from itertools import islice
from pathlib import Path
from typing import Any

import click
import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.cli import OneLineErrors
from quantbench.models.llama import Attention, FeedForward, Transformer
from quantbench.models.loading import load_model
from quantbench.models.mixtral import MixtureOfExperts, Router
from quantbench.models.mixture import Mixture
from quantbench.models.registry import build
from quantbench.models.tiny import train as dense

HERE = Path(__file__).parent
EXPERTS, CHOSEN, WIDTH = 8, 2, 128
CONFIG = dataclasses.replace(
    dense.CONFIG,
    name="tiny_moe",
    mixture=Mixture(EXPERTS, CHOSEN, WIDTH, shared_dim=dense.CONFIG.ffn_dim),
    architecture="mixtral",
)
BALANCE = 0.005  # weight of the loss that keeps experts from dying out
DROPOUT = 0.15  # of what attention and the feed-forward networks add to the residual stream
RATES = {"matrices": 0.003, "others": 6e-4}  # peak learning rates


# ---------------------------------------------------------------------------------- the beginning


def upcycled(tokens: Tensor) -> Transformer:
    """The mixture that the embedded model becomes; its logits are the same.

    tokens (B, S): the text whose tokens are put into clusters.
    """
    teacher, model = load_model("tiny"), build(CONFIG)
    layers = list(zip(teacher.layers, model.layers, strict=True))
    inputs = [_inputs(old.feed_forward) for old, _ in layers]
    with torch.no_grad():
        teacher(tokens)
        for name, parameter in model.named_parameters():
            if ".feed_forward." not in name:
                parameter.copy_(teacher.get_parameter(name))
        for (old, new), x in zip(layers, inputs, strict=True):
            _add_experts(old.feed_forward, new.feed_forward, torch.cat(x))
    return model


def _inputs(module: nn.Module) -> list[Tensor]:
    """A list to which the inputs (T, D) of the module's calls will be added."""
    inputs: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, x: inputs.append(x[0].flatten(0, -2)))
    return inputs


def _add_experts(old: FeedForward, new: MixtureOfExperts, x: Tensor) -> None:
    """Give a mixture the weights with which it computes what `old` computes. x (T, D): inputs."""
    centers, cluster = clusters(x, EXPERTS)
    new.router.weight.copy_(centers - centers.mean(0))
    new.shared_gate.weight.zero_()  # a gate of one half for every token
    new.shared.w13.weight.copy_(old.w13.weight)
    new.shared.w2.weight.copy_(2 * old.w2.weight)
    gate, up = old.w13.weight.chunk(2)
    activity = (F.silu(x @ gate.T) * (x @ up.T)).abs() * old.w2.weight.norm(dim=0)  # (T, F)
    for number, expert in enumerate(new.experts):
        neurons = (activity[cluster == number].mean(0) - activity.mean(0)).topk(WIDTH).indices
        expert.w13.weight.copy_(torch.cat((gate[neurons], up[neurons])))
        expert.w2.weight.zero_()


def clusters(x: Tensor, count: int, rounds: int = 20) -> tuple[Tensor, Tensor]:
    """Spherical k-means: the centers (count, D), of unit length, and each row's cluster (T,) int64.

    x (T, D). A row belongs to the center with which it has the largest product. Centers begin at
    rows drawn at random; one that loses all of its rows begins anew at another.
    """
    unit = F.normalize(x, dim=1)
    centers = unit[torch.randperm(len(unit))[:count]]
    for _ in range(rounds):
        cluster = (unit @ centers.T).argmax(1)
        sums = torch.zeros_like(centers).index_add_(0, cluster, unit)
        empty = cluster.bincount(minlength=count) == 0
        sums[empty] = unit[torch.randint(len(unit), (int(empty.sum()),))]
        centers = F.normalize(sums, dim=1)
    return centers, (unit @ centers.T).argmax(1)


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
        share = F.one_hot(output[0].flatten(), EXPERTS).float().mean(0)
        self.terms.append(EXPERTS * (probability * share).sum())

    def loss(self) -> Tensor:
        """Switch Transformer's (Fedus et al. 2021, https://arxiv.org/abs/2101.03961), the mean
        over layers: 1 where all experts are chosen equally often."""
        terms, self.terms = self.terms, []
        return torch.stack(terms).mean()


def add_dropout(model: Transformer) -> None:
    """Drop elements of what the layers add to the residual stream, from now on in every pass."""
    for module in model.modules():
        if isinstance(module, Attention | MixtureOfExperts):
            module.register_forward_hook(lambda _module, _inputs, y: F.dropout(y, DROPOUT))


def documents() -> list[list[int]]:
    """The tokens of every module of Python's library but the held-out ones."""
    modules = dense.corpus()
    for name in dense.HELD_OUT:
        del modules[name]
    tokenizer = sentencepiece.SentencePieceProcessor(str(dense.HERE / "tokenizer.model"))
    return [[dense.BOS, *tokenizer.encode(text), dense.EOS] for text in modules.values()]


class Training:
    """A training that can be interrupted: `save` writes everything, and `Training` with the same
    arguments goes on from it."""

    def __init__(self, steps: int, rows: int, seed: int, state: Path) -> None:
        """rows: sequences in a step. state: the file that `save` writes."""
        self.steps, self.file = steps, state
        self.step, self.seconds = 0, 0.0
        stored: dict[str, Any] = torch.load(state, weights_only=True) if state.exists() else {}
        torch.manual_seed(seed)
        self.documents = stored["documents"] if stored else documents()
        batches = dense.batches(self.documents, steps, torch.Generator().manual_seed(seed), rows)
        if stored:
            self.model = build(CONFIG)
            self.model.load_state_dict(stored["model"])
        else:
            generator = torch.Generator().manual_seed(0)
            first = next(dense.batches(self.documents, 1, generator, rows))
            self.model = upcycled(first[:, :-1])
        self.model.requires_grad_(True)
        self.balance = Balance(self.model)
        add_dropout(self.model)
        self.optimizers = dense.optimizers(self.model, **RATES)
        self.peaks = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        if stored:
            self.step, self.seconds = stored["step"], stored["seconds"]
            for optimizer, kept in zip(self.optimizers, stored["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
            torch.set_rng_state(stored["random"])
        self.batches = islice(batches, self.step, None)

    def loss(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()), self.balance.loss()

    def run(self, seconds: float) -> None:
        """Train until all steps are done or the time is over."""
        started = time.monotonic()
        for rows in self.batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss, balance = self.loss(rows)
            (loss + BALANCE * balance).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            rate = dense.learning_rate(self.step, self.steps)
            for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * rate
                optimizer.step()
                optimizer.zero_grad()
            self.step += 1
            if self.step % 10 == 0:
                click.echo(
                    f"step {self.step}/{self.steps} loss {loss.item():.3f} balance "
                    f"{balance.item():.3f} {time.monotonic() - started:.0f} s"
                )
            if time.monotonic() - started > seconds:
                break
        self.seconds += time.monotonic() - started

    def save(self) -> None:
        content = {
            "step": self.step,
            "seconds": self.seconds,
            "documents": self.documents,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "random": torch.get_rng_state(),
        }
        partial = self.file.with_suffix(".partial")
        torch.save(content, partial)
        partial.replace(self.file)


# ---------------------------------------------------------------------------------- the result


def held_out_bits(model: Transformer) -> float:
    """Bits per byte of the held-out text."""
    text = (dense.HERE / "heldout.txt").read_text()
    tokenizer = sentencepiece.SentencePieceProcessor(str(dense.HERE / "tokenizer.model"))
    nats = dense.held_out_nats(model, tokenizer.encode(text))
    return nats / math.log(2) / len(text.encode())


@click.command(cls=OneLineErrors)
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True,
              help="The learning rate falls over the second half of them.")  # fmt: skip
@click.option("--rows", type=click.IntRange(1), default=4, show_default=True,
              help=f"sequences of {dense.CONTEXT} tokens in a step")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--minutes", type=float, default=1e9, help="Stop after so many, to be resumed.")
@click.option("--output", default=HERE, type=click.Path(path_type=Path), show_default=True)
@click.option("--state", default=Path("tiny_moe.state"), type=click.Path(path_type=Path),
              show_default=True, help="The file from which to go on.")  # fmt: skip
@click.option("--debug", is_flag=True, help="Show tracebacks")
def main(
    steps: int,
    rows: int,
    seed: int,
    threads: int,
    minutes: float,
    output: Path,
    state: Path,
    debug: bool,
) -> None:
    """Train the embedded mixture of experts anew, into --output."""
    torch.set_num_threads(threads)
    training = Training(steps, rows, seed, state)
    training.run(60 * minutes)
    if training.step < steps:
        training.save()
        click.echo(f"{training.step} of {steps} steps; the same command goes on")
        return
    dense.export(training.model, output, eight_bit=True)
    if output != HERE:
        shutil.copyfile(dense.HERE / "tokenizer.model", output / "tokenizer.model")
    record = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": seed,
        "steps": steps,
        "tokens_per_step": rows * dense.CONTEXT,
        "corpus_tokens": sum(map(len, training.documents)),
        "bits_per_byte": held_out_bits(load_model(str(output))),  # of the stored weights
        "model_bytes": (output / "model.safetensors").stat().st_size,
        "seconds": round(training.seconds),
    }
    (output / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    state.unlink(missing_ok=True)
    click.echo(f"done: {record['bits_per_byte']:.4f} bits per byte")


if __name__ == "__main__":
    main()
