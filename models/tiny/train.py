"""Train the embedded models, on the source of Python's standard library:

- tiny, a Llama of 6.4 M parameters;
- tiny_moe, a mixture of experts of 10.3 M parameters, of which a token uses 7.4 M.

    python -m quantbench.models.tiny.train                   # one to two hours on 2 cores with AMX
    python -m quantbench.models.tiny.train --model tiny_moe  # half an hour on one core
    python -m quantbench.models.tiny.train --minutes 9       # a piece; the next call goes on
    python -m quantbench.models.tiny.train --steps 20        # a try-out, into --output, too

What comes out, in models/tiny/: model.safetensors (bfloat16, Hugging Face names), config.json,
tokenizer.model (sentencepiece, 4096 pieces), heldout.txt (whole modules that no batch contained)
and training.json (the curve and the final figures). Tests, generated tables and the documentation
dump are left out of the corpus: they would teach the model tables instead of Python. tiny_moe has
the same tokenizer, and linear layers in 8 bits, by Qwen2-MoE's names.

The training of tiny_moe begins with tiny's weights ("sparse upcycling": Komatsuzaki et al. 2022,
https://arxiv.org/abs/2212.05055). Its feed-forward network becomes the expert that all tokens
share. Beside it each layer gets 8 experts, of which a token takes two:

- The layer's inputs, for some text, are put into 8 clusters by k-means. The router begins with the
  clusters' centers, so at first an expert gets the tokens of one kind.
- An expert begins with the 128 neurons of the network that are most active on its own tokens, as in
  MoEfication (Zhang et al. 2022, https://arxiv.org/abs/2110.01786). Their weights of the second
  matrix begin at zero, so at first the model computes exactly what the embedded model computes.

Then everything is trained on the same text, with dropout: tiny has seen that text for 8 epochs and
knows it by heart. It needs 1.3 nats for a token of it, and 2.4 for one of the held-out text.

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
from quantbench.models.config import ModelConfig
from quantbench.models.formats.compressed_tensors import EIGHT_BIT, packed
from quantbench.models.formats.names import hugging_face
from quantbench.models.llama import Attention, FeedForward, Transformer
from quantbench.models.loading import load_model
from quantbench.models.mixtral import MixtureOfExperts, Router
from quantbench.models.mixture import Mixture
from quantbench.models.registry import build

HERE = Path(__file__).parent
CONTEXT = 1024
CONFIG = ModelConfig(
    name="tiny",
    dim=256,
    num_layers=5,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    ffn_dim=768,
    vocab_size=4096,
    max_position=CONTEXT,
    norm_eps=1e-5,
)
EXPERTS, CHOSEN, WIDTH = 8, 2, 128
MIXTURE = Mixture(EXPERTS, CHOSEN, WIDTH, shared_dim=CONFIG.ffn_dim)
BOS, EOS = 1, 2


@dataclass(frozen=True)
class Recipe:
    """How one of the models is trained."""

    config: ModelConfig
    steps: int
    rows: int  # sequences of CONTEXT tokens in a step
    matrices: float  # peak learning rates: of the layers' matrices,
    others: float  # and of all other weights
    dropout: float = 0.0  # of what attention and the feed-forward networks add to the residual
    balance: float = 0.0  # weight of the loss that keeps experts from dying out


RECIPES = {
    "tiny": Recipe(CONFIG, steps=3000, rows=8, matrices=0.01, others=3e-3),
    "tiny_moe": Recipe(
        dataclasses.replace(CONFIG, name="tiny_moe", mixture=MIXTURE, architecture="mixtral"),
        *(300, 4, 0.003, 6e-4, 0.15, 0.005),
    ),
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
        vocab_size=CONFIG.vocab_size,
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
            std = 0.02 / math.sqrt(2 * CONFIG.num_layers) if residual else 0.02
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


# ---------------------------------------------------------------------- the beginning of tiny_moe


def upcycled(tokens: Tensor) -> Transformer:
    """The mixture that the embedded model becomes; its logits are the same.

    tokens (B, S): the text whose tokens are put into clusters.
    """
    teacher, model = load_model("tiny"), build(RECIPES["tiny_moe"].config)
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

    def __init__(self, recipe: Recipe, seed: int, state: Path, output: Path) -> None:
        """state: the file that `save` writes. output: the folder of the result."""
        self.recipe, self.file = recipe, state
        self.step, self.seconds = 0, 0.0
        stored: dict[str, Any] = torch.load(state, weights_only=True) if state.exists() else {}
        self.curve: list[dict[str, float]] = stored.get("curve", [])
        mixture = recipe.config.mixture
        self.words = (
            HERE if mixture else output
        )  # the folder of the held-out text and the tokenizer
        torch.manual_seed(seed)
        self.documents = stored.get("documents") or documents(None if mixture else output)
        generator = torch.Generator().manual_seed(seed)
        every = batches(self.documents, recipe.steps, generator, recipe.rows)
        if stored or not mixture:
            self.model = build(recipe.config)
            initialize(self.model)
        else:
            first = next(batches(self.documents, 1, torch.Generator().manual_seed(0), recipe.rows))
            self.model = upcycled(first[:, :-1])
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

    def run(self, seconds: float, output: Path) -> None:
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
                export(self.model, output, eight_bit=self.recipe.config.mixture is not None)
                bits = held_out_bits(load_model(str(output)), self.words)  # of the stored weights
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
    """Bits per byte of the held-out text in a folder."""
    text = (words / "heldout.txt").read_text()
    tokenizer = sentencepiece.SentencePieceProcessor(str(words / "tokenizer.model"))
    return held_out_nats(model, tokenizer.encode(text)) / math.log(2) / len(text.encode())


def held_out_nats(model: Transformer, tokens: list[int]) -> float:
    """Total negative log-likelihood of the tokens, each predicted from at least half a context."""
    total, half = 0.0, CONTEXT // 2
    stream = torch.tensor([BOS, *tokens])
    with torch.no_grad():
        for start in range(0, len(stream) - 1, half):
            begin = max(0, start - half)
            window = stream[begin : start + half + 1]
            logits = model(window[None, :-1])[0, start - begin :].float()
            total += F.cross_entropy(logits, window[start - begin + 1 :], reduction="sum").item()
    return total


def export(model: Transformer, folder: Path, eight_bit: bool = False) -> None:
    """Write the model as a Hugging Face folder: model.safetensors and config.json.

    eight_bit: linear layers are stored in 8 bits with a scale for each row, in compressed-tensors'
    format (models/formats/compressed_tensors.py). Everything else is stored in bfloat16.
    """
    linear = model.config.linear_shapes()
    tensors = {}
    for name, parameter in model.state_dict().items():
        parts = hugging_face(name)
        small = eight_bit and name.removesuffix(".weight") in linear
        for part, piece in zip(parts, parameter.chunk(len(parts)), strict=True):
            stored = packed(piece) if small else {"": piece.to(torch.bfloat16).contiguous()}
            tensors |= {part + suffix: tensor for suffix, tensor in stored.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    how = {"quantization_config": EIGHT_BIT} if eight_bit else {}
    config = json.dumps(hugging_face_config(model.config) | how, indent=2)
    (folder / "config.json").write_text(config + "\n")


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of this Llama or, if it has experts, of this Qwen2-MoE."""
    experts = config.mixture
    keys = {
        "architectures": ["Qwen2MoeForCausalLM" if experts else "LlamaForCausalLM"],
        "model_type": "qwen2_moe" if experts else "llama",
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16",
    }
    if experts is None:
        return keys | {"head_dim": config.head_dim}
    return keys | {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.expert_dim,
        "shared_expert_intermediate_size": experts.shared_dim,
        "norm_topk_prob": experts.normalized,
        "qkv_bias": config.qkv_bias,
    }


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
    output, state = output or HERE.parent / name, state or Path(f"{name}.state")
    training = Training(recipe, seed, state, output)
    training.run(60 * minutes, output)
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
