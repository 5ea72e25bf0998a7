"""Train the embedded mixture of experts: 5.9 M parameters, of which a token uses 5.1 M.

    python -m models.tiny_moe.train --steps 400 --fall 1                # at a level rate
    python -m models.tiny_moe.train --steps 90 --fall 90 --seed 2 --begin models/tiny_moe
    python -m models.tiny_moe.train … --minutes 4       # a piece; the same command goes on

What comes out, in models/tiny_moe/: model.safetensors (bfloat16, Qwen2-MoE's names), config.json,
the tokenizer and training.json. Text, tokenizer and held-out modules are those of the embedded
model, models/tiny.

It begins with the embedded model's weights, which saves most of the time that training from
nothing takes (sparse upcycling: Komatsuzaki et al. 2022, https://arxiv.org/abs/2212.05055). Of each
feed-forward network the neurons that matter most become the expert that all tokens share. The next
ones become 8 experts, of which a token takes two: neurons whose gates have similar weights come
together, as in MoEfication (Zhang et al. 2022, https://arxiv.org/abs/2110.01786), and the router
begins with each expert's mean gate. The last sixth of the neurons is left out. Then the model is
trained on the same text: first at a level rate, then at one that falls. Everything random is
seeded. In the first run of the published weights the rate went down to 0.87 of that level at step
96, and stayed there.
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
from safetensors.torch import save_file
from torch import Tensor, nn

from cli import OneLineErrors
from models.checkpoints.load import load_model
from models.checkpoints.names import hugging_face
from models.llama import Transformer
from models.mixtral import Router
from models.mixture import Mixture
from models.registry import build
from models.tiny import train as dense

HERE = Path(__file__).parent
EXPERTS, CHOSEN, WIDTH = 8, 2, 32
SHARED = 384  # width of the expert that all tokens share
CONFIG = dataclasses.replace(
    dense.CONFIG,
    name="tiny_moe",
    mixture=Mixture(EXPERTS, CHOSEN, WIDTH, shared_dim=SHARED),
    architecture="mixtral",
)
BALANCE = 0.005  # weight of the loss that keeps experts from dying out
WARM_UP = 20  # steps


# ---------------------------------------------------------------------------------- the beginning


def upcycled(tokens: Tensor) -> Transformer:
    """The model that the embedded one becomes. tokens (B, S): a text that shows which neurons
    matter."""
    teacher, model = load_model("tiny"), build(CONFIG)
    inputs: dict[int, Tensor] = {}
    for number, layer in enumerate(teacher.layers):
        layer.feed_forward.w2.register_forward_pre_hook(
            lambda _, x, number=number: inputs.__setitem__(number, x[0].flatten(0, -2))
        )
    with torch.no_grad():
        teacher(tokens)
        for name, parameter in model.named_parameters():
            if ".feed_forward." not in name:
                parameter.copy_(teacher.get_parameter(name))
        for number, (old, new) in enumerate(zip(teacher.layers, model.layers, strict=True)):
            _cut_into_experts(old.feed_forward, new.feed_forward, inputs[number])
    return model


def _cut_into_experts(old: nn.Module, new: nn.Module, inputs: Tensor) -> None:
    """Share out the neurons of a feed-forward network. inputs (T, F): of its second matrix."""
    gate, up = old.w13.weight.chunk(2)
    matters = inputs.abs().mean(0) * old.w2.weight.norm(dim=0)
    order = matters.argsort(descending=True)
    routed = order[SHARED : SHARED + EXPERTS * WIDTH]
    groups, centers = _clusters(gate[routed])
    parts = [(new.shared, order[:SHARED])]
    parts += [(expert, routed[groups[i]]) for i, expert in enumerate(new.experts)]
    for part, neurons in parts:
        part.w13.weight.copy_(torch.cat((gate[neurons], up[neurons])))
        # The shared expert's gate begins at one half, and a token's experts have about a half each.
        part.w2.weight.copy_(2 * old.w2.weight[:, neurons])
    new.router.weight.copy_(F.normalize(centers - centers.mean(0), dim=1))
    new.shared_gate.weight.zero_()


def _clusters(rows: Tensor, rounds: int = 30) -> tuple[list[Tensor], Tensor]:
    """EXPERTS groups of WIDTH similar rows each, as indices, and the groups' means.

    Balanced k-means: in each round the closest pairs of row and center come first, as long as the
    center has room.
    """
    unit = F.normalize(rows, dim=1)
    centers = unit[torch.randperm(len(unit))[:EXPERTS]]
    for _ in range(rounds):
        near = unit @ F.normalize(centers, dim=1).T  # (rows, experts)
        groups: list[list[int]] = [[] for _ in range(EXPERTS)]
        placed = [False] * len(unit)
        for pair in near.flatten().argsort(descending=True).tolist():
            row, expert = divmod(pair, EXPERTS)
            if not placed[row] and len(groups[expert]) < WIDTH:
                groups[expert].append(row)
                placed[row] = True
        centers = torch.stack([unit[group].mean(0) for group in groups])
    return [torch.tensor(group) for group in groups], centers


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
        probability = scores.float().softmax(-1).mean(0)
        share = F.one_hot(output[0].flatten(), EXPERTS).float().mean(0)
        self.terms.append(EXPERTS * (probability * share).sum())

    def loss(self) -> Tensor:
        """Switch Transformer's (Fedus et al. 2021, https://arxiv.org/abs/2101.03961), the mean
        over layers: 1 where all experts are chosen equally often."""
        terms, self.terms = self.terms, []
        return torch.stack(terms).mean()


_MATRICES = tuple(f"{name}.weight" for name in ("wqkv", "wo", "w13", "w2"))


def optimizers(model: Transformer) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the tables, the routers and the norms."""
    named = dict(model.named_parameters())
    routers = [p for name, p in named.items() if "router" in name or "gate" in name]
    matrices = [p for n, p in named.items() if p.ndim == 2 and n.endswith(_MATRICES)]
    norms = [p for p in named.values() if p.ndim == 1]
    tables = [model.tok_embeddings.weight, model.output.weight]
    groups = [
        {"params": tables, "weight_decay": 0.1, "lr": 6e-4},
        {"params": routers, "weight_decay": 0.0, "lr": 2e-3},
        {"params": norms, "weight_decay": 0.0, "lr": 6e-4},
    ]
    return [
        torch.optim.Muon(matrices, lr=0.002, weight_decay=0.1, adjust_lr_fn="original"),
        torch.optim.AdamW(groups, betas=(0.9, 0.95)),
    ]


def learning_rate(step: int, steps: int, fall: int) -> float:
    """The fraction of the peak rate: a short warm-up, a plateau, and a fall of so many steps."""
    return min((step + 1) / WARM_UP, 1.0, (steps - step) / fall)


def documents() -> list[list[int]]:
    """The tokens of every module of Python's library but the held-out ones."""
    modules = dense.corpus()
    for name in dense.HELD_OUT:
        del modules[name]
    tokenizer = sentencepiece.SentencePieceProcessor(str(dense.HERE / "tokenizer.model"))
    return [[dense.BOS, *tokenizer.encode(text), dense.EOS] for text in modules.values()]


class Training:
    """A training that can be interrupted: `save` writes everything, and `load` goes on from it."""

    def __init__(
        self, steps: int, fall: int, rows: int, seed: int, state: Path, begin: Path | None
    ) -> None:
        """begin: a model's folder; what the embedded model becomes, if not given."""
        self.steps, self.fall, self.rows, self.file = steps, fall, rows, state
        self.step, self.seconds = 0, 0.0
        stored: dict[str, Any] = torch.load(state, weights_only=True) if state.exists() else {}
        torch.manual_seed(seed)
        self.documents = stored["documents"] if stored else documents()
        self.tokens = sum(map(len, self.documents))
        batches = dense.batches(self.documents, steps, torch.Generator().manual_seed(seed), rows)
        if stored:
            self.model = build(CONFIG)
            self.model.load_state_dict(stored["model"])
        elif begin:
            self.model = load_model(str(begin))
        else:
            generator = torch.Generator().manual_seed(0)
            first = next(dense.batches(self.documents, 1, generator, rows))
            self.model = upcycled(first[:, :-1])
        self.model.requires_grad_(True)
        self.balance = Balance(self.model)
        self.optimizers = optimizers(self.model)
        self.peaks = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        if stored:
            self.step, self.seconds = stored["step"], stored["seconds"]
            for optimizer, kept in zip(self.optimizers, stored["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
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
            rate = learning_rate(self.step, self.steps, self.fall)
            for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * rate
                optimizer.step()
                optimizer.zero_grad()
            self.step += 1
            if self.step % 20 == 0:
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


def export(model: Transformer, folder: Path) -> None:
    """Write the model as a Hugging Face folder of type qwen2_moe, with the tokenizer."""
    tensors = {}
    for name, parameter in model.state_dict().items():
        parts = hugging_face(name)
        for part, piece in zip(parts, parameter.chunk(len(parts)), strict=True):
            tensors[part] = piece.to(torch.bfloat16).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "hidden_size": CONFIG.dim,
        "intermediate_size": CONFIG.ffn_dim,
        "moe_intermediate_size": WIDTH,
        "shared_expert_intermediate_size": SHARED,
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "norm_topk_prob": True,
        "qkv_bias": False,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "vocab_size": CONFIG.vocab_size,
        "max_position_embeddings": CONFIG.max_position,
        "rms_norm_eps": CONFIG.norm_eps,
        "rope_theta": CONFIG.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": dense.BOS,
        "eos_token_id": dense.EOS,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(dense.HERE / "tokenizer.model", folder / "tokenizer.model")


@click.command(cls=OneLineErrors)
@click.option("--steps", type=click.IntRange(1), default=400, show_default=True)
@click.option("--fall", type=click.IntRange(1), default=1, show_default=True,
              help="of these the last, in which the rate falls")  # fmt: skip
@click.option("--rows", type=click.IntRange(1), default=4, show_default=True,
              help=f"sequences of {dense.CONTEXT} tokens in a step")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--minutes", type=float, default=1e9, help="Stop after so many, to be resumed.")
@click.option("--output", default=HERE, type=click.Path(path_type=Path), show_default=True)
@click.option("--begin", type=click.Path(path_type=Path), help="Folder of a model to go on from.")
@click.option("--state", default=Path("tiny_moe.state"), type=click.Path(path_type=Path),
              show_default=True, help="The file from which to go on.")  # fmt: skip
@click.option("--debug", is_flag=True, help="Show tracebacks")
def main(
    steps: int,
    fall: int,
    rows: int,
    seed: int,
    threads: int,
    minutes: float,
    output: Path,
    begin: Path | None,
    state: Path,
    debug: bool,
) -> None:
    """Train the embedded mixture of experts anew, into --output."""
    torch.set_num_threads(threads)
    training = Training(steps, fall, rows, seed, state, begin)
    training.run(60 * minutes)
    if training.step < steps:
        training.save()
        click.echo(f"{training.step} of {steps} steps; the same command goes on")
        return
    bits = held_out_bits(training.model)
    export(training.model, output)
    record = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": seed,
        "steps": steps,
        "began_with": json.loads((begin / "training.json").read_text()) if begin else None,
        "tokens_per_step": rows * dense.CONTEXT,
        "corpus_tokens": training.tokens,
        "bits_per_byte": bits,
        "model_bytes": (output / "model.safetensors").stat().st_size,
        "seconds": round(training.seconds),
    }
    (output / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    state.unlink(missing_ok=True)
    click.echo(f"done: {bits:.4f} bits per byte")


if __name__ == "__main__":
    main()
