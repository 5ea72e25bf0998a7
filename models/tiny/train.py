"""Train the embedded model: a 6.4 M parameter Llama on the source of Python's standard library.

    python -m quantbench.models.tiny.train                 # one to two hours on 2 cores with AMX
    python -m quantbench.models.tiny.train --steps 20  # a try-out, into --output, too

What comes out, in models/tiny/: model.safetensors (bfloat16, Hugging Face names), config.json,
tokenizer.model (sentencepiece, 4096 pieces), heldout.txt (whole modules that no batch contained)
and training.json (the curve and the final figures). Tests, generated tables and the documentation
dump are left out of the corpus: they would teach the model tables instead of Python.

Everything random is seeded. The same CPython version (training.json names it) and the same torch
build give the same batches; floating-point sums may still differ between processors.
"""

import io
import json
import lzma
import math
import platform
import sysconfig
import time
from collections.abc import Iterator
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
from quantbench.models.llama import Transformer
from quantbench.models.registry import build

HERE = Path(__file__).parent
CONTEXT = 1024
ROWS = 8  # sequences a step
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
BOS, EOS = 1, 2

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
    documents: list[list[int]], steps: int, generator: torch.Generator, size: int = ROWS
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


def optimizers(
    model: Transformer, matrices: float = 0.01, others: float = 3e-3
) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embeddings, the head, the norms and, in a
    mixture of experts, the routers and gates. The numbers are the peak learning rates."""
    named = dict(model.named_parameters())
    tables = [model.tok_embeddings.weight, model.output.weight]
    routers = [named[name] for name in named if name.endswith(("router.weight", "gate.weight"))]
    norms = [parameter for parameter in named.values() if parameter.ndim == 1]
    by_adam = {id(parameter) for parameter in (*tables, *routers, *norms)}
    by_muon = [parameter for parameter in named.values() if id(parameter) not in by_adam]
    return [
        torch.optim.Muon(by_muon, lr=matrices, weight_decay=0.1, adjust_lr_fn="original"),
        torch.optim.AdamW(
            [
                {"params": tables, "weight_decay": 0.1},
                {"params": [*norms, *routers], "weight_decay": 0.0},
            ],
            lr=others,
            betas=(0.9, 0.95),
        ),
    ]


def learning_rate(step: int, steps: int) -> float:
    """The fraction of the peak rate: a short warm-up, a plateau, a linear fall in the last half."""
    warmup = min(100, steps // 10 + 1)
    return min((step + 1) / warmup, 1.0, 2 * (steps - step) / steps)


def held_out_nats(model: Transformer, tokens: list[int]) -> float:
    """Total negative log-likelihood of the tokens, each predicted from at least half a context."""
    total, half = 0.0, CONTEXT // 2
    stream = torch.tensor([BOS, *tokens])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
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
@click.option("--steps", type=click.IntRange(1), default=3000, show_default=True,
              help=f"steps of {ROWS * CONTEXT} tokens")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--output", default=HERE, type=click.Path(path_type=Path), show_default=True)
@click.option("--debug", is_flag=True, help="Show tracebacks")
def main(steps: int, seed: int, threads: int, output: Path, debug: bool) -> None:
    """Train the embedded model anew, into --output."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    output.mkdir(parents=True, exist_ok=True)

    modules = corpus()
    held_out = "".join(modules.pop(name) for name in HELD_OUT)
    (output / "heldout.txt").write_text(held_out)
    heldout_bytes = len(held_out.encode())
    xz = lzma.compress(held_out.encode(), preset=9)

    proto = train_tokenizer(list(modules.values()))
    (output / "tokenizer.model").write_bytes(proto)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=proto)
    documents = [[BOS, *tokenizer.encode(text), EOS] for text in modules.values()]
    held_out_tokens = tokenizer.encode(held_out)
    size = sum(len(text.encode()) for text in modules.values())
    tokens = sum(map(len, documents))
    click.echo(f"{len(modules)} modules, {size / 1e6:.1f} MB, {tokens / 1e6:.2f} M tokens; "
               f"held out {heldout_bytes / 1e3:.0f} kB, {len(held_out_tokens)} tokens")  # fmt: skip

    model = build(CONFIG)
    initialize(model)

    @torch.compile
    def training_loss(rows: Tensor) -> Tensor:
        logits = model(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    both = optimizers(model)
    schedule = [(group, group["lr"]) for optimizer in both for group in optimizer.param_groups]
    curve, started = [], time.monotonic()
    for step, rows in enumerate(batches(documents, steps, generator)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = training_loss(rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group, peak in schedule:
            group["lr"] = peak * learning_rate(step, steps)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        last = step + 1 == steps
        if step % 10 == 0:
            rate = (step + 1) * ROWS * CONTEXT / (time.monotonic() - started)
            click.echo(f"step {step}/{steps} loss {loss.item():.3f} {rate:.0f} tokens/s")
        if last or (step and step % 250 == 0):
            bits = held_out_nats(model, held_out_tokens) / math.log(2) / heldout_bytes
            curve.append({"step": step, "loss": round(loss.item(), 4), "bits_per_byte": bits})
            click.echo(f"step {step}/{steps} held-out bits per byte {bits:.4f}")
            export(model, output)
            record = {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "seed": seed,
                "steps": steps,
                "tokens_per_step": ROWS * CONTEXT,
                "corpus_tokens": tokens,
                "heldout_bytes": heldout_bytes,
                "heldout_modules": HELD_OUT,
                "xz_bits_per_byte": 8 * len(xz) / heldout_bytes,
                "seconds": round(time.monotonic() - started),
                "curve": curve,
            }
            (output / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
