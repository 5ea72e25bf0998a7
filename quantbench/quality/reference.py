"""What a reference model read, and its final hidden states on it: one tensor (n, D) a passage, in
the model's own dtype, so that nothing is lost. Its head is read from its checkpoint.

    full = read_on(plan, model, Texts(plan, None, 4096), looks=1)
    full.write(path)
    full = Reference.read(path)
    full.head(plan)(full.hidden(0)[None])     # the reference's logits (1, n, V)
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from quantbench.log.config import argv
from quantbench.log.options import parse
from quantbench.models.llama import Transformer
from quantbench.progress import Report
from quantbench.quality.scores import Reader
from quantbench.quality.texts import Passage, Texts
from quantbench.quality.thresholds import FIRST_TOKENS
from quantbench.run.checks import EXPERTS
from quantbench.run.loading import Loading
from quantbench.run.plan import Plan, make_plan
from quantbench.typed_json import from_json, to_json


@dataclass(frozen=True)
class About:
    """The JSON in the file."""

    argv: list[str]  # the run's, by which its head is read again
    vocab_size: int
    passages: list[Passage]  # that were read
    looks: int
    whole: bool  # whether there is no more to read


@dataclass(frozen=True)
class Reference:
    about: About
    hidden: Callable[[int], Tensor]  # the states (n, D) on the passage of this number

    @staticmethod
    def read(path: str | Path) -> "Reference":
        """A file that was written, which may be removed or replaced meanwhile. Raises OSError where
        it is not there, ValueError where it holds something else."""
        try:
            file: Any = safe_open(str(path), "pt")
            about = from_json(About, json.loads(file.metadata()["about"]))
        except OSError:
            raise
        except Exception as error:  # SafetensorError is an Exception, no OSError
            raise ValueError(f"{path}: {error}") from error
        return Reference(about, lambda number: file.get_tensor(str(number)))

    def write(self, path: Path) -> None:
        """Raises OSError where it cannot be written."""
        states = {str(number): self.hidden(number) for number in range(len(self.passages))}
        path.write_bytes(save(states, {"about": json.dumps(to_json(self.about))}))

    @property
    def passages(self) -> list[Passage]:
        return self.about.passages

    def head(self, plan: Plan) -> Callable[[Tensor], Tensor]:
        """The reference's logits (1, n, V) from its hidden states (1, n, D).

        plan: that of the process, which keeps its threads and ranks.
        """
        config, defaults = parse(self.about.argv), type(plan.config)
        names = ("save", "format", "expert_memory", *EXPERTS)
        unused = {name: getattr(defaults(), name) for name in names}
        own_process = {name: getattr(plan.config, name) for name in ("threads", "tp")}
        own = make_plan(dataclasses.replace(config, **unused, **own_process, num_layers=1))
        if plan.split and own.split:
            split = dataclasses.replace(own.split, ranks=plan.split.ranks)
            own = dataclasses.replace(own, split=split)
        model = model_of(own)
        model.layers, model.tok_embeddings = nn.ModuleList(), nn.Embedding(0, 0)
        return lambda x: model.logits(x.to(own.device))


def model_of(plan: Plan) -> Transformer:
    """The plan's model, beside another one of this process: quietly, and not counted as its peak of
    memory."""
    given = (plan.config, plan.spec, plan.device, plan.tokenizer, plan.split, plan.checkpoint)
    return Loading(*given).load(lambda done, total: None, lambda line: None)


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
    passages = list(before.passages) if before else []
    states = [before.hidden(number) for number in range(len(passages))] if before else []
    reader, look = Reader(plan, model), before.about.looks if before else 0
    whole = before is not None and before.about.whole
    while look < looks and not whole:
        for passage in texts.look(look, model):
            passages.append(passage)
            states.append(reader.hidden(passage).cpu())
            report(sum(map(len, states)), FIRST_TOKENS << look)
        whole, look = texts.last(look), look + 1
    options = argv(plan.config, said=True)
    about = About(options, plan.architecture.vocab_size, passages, look, whole)
    return Reference(about, states.__getitem__)
