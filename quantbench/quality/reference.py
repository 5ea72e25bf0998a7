"""A file of what a reference model read, and of its final hidden states on it: one tensor (n, D) a
passage, in the model's own dtype, so that nothing is lost. Its head is read from its checkpoint.

    full = Reference(path)
    full.head(plan)(full.hidden(passage)[None])     # the reference's logits (1, n, V)
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from quantbench.log.config import argv
from quantbench.log.options import parse
from quantbench.quality.texts import Passage
from quantbench.quality.types import Quality
from quantbench.run.checks import EXPERTS
from quantbench.run.loading import Loading
from quantbench.run.plan import Plan, make_plan
from quantbench.typed_json import from_json, omitted, to_json

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class About:
    """The JSON in the file."""

    argv: list[str]  # the run's, by which its head is read again
    vocab_size: int
    passages: list[Passage]  # all, whether they were read already or not
    noise_floor: Quality | None = omitted()


class Reference:
    """A file that was written. It can be read while it is removed or replaced."""

    def __init__(self, path: str | Path) -> None:
        """Raises OSError where it is not there, ValueError where it holds something else."""
        self.path = Path(path)
        try:
            file: Any = safe_open(str(path), "pt")
            self.about = from_json(About, json.loads(file.metadata()["about"]))
        except OSError:
            raise
        except Exception as error:  # safetensors has an error class of its own
            raise ValueError(f"{path}: {error}") from error
        self.read = self.about.passages[: len(file.keys())]
        self.file = file
        self.whole = len(self.read) == len(self.about.passages)
        self.looks = 1 + max(passage.look for passage in self.read)

    @staticmethod
    def write(
        path: str | Path,
        plan: Plan,
        passages: Sequence[Passage],
        hidden: Sequence[Tensor],
        noise_floor: Quality | None = None,
    ) -> None:
        """hidden: of the first passages. Raises OSError where it cannot be written."""
        options = argv(plan.config, said=True)
        about = About(options, plan.architecture.vocab_size, list(passages), noise_floor)
        named = {str(number): states for number, states in enumerate(hidden)}
        try:
            save_file(named, path, {"about": json.dumps(to_json(about))})
        except Exception as error:  # safetensors has an error class of its own
            raise error if isinstance(error, OSError) else OSError(0, str(error)) from None

    def hidden(self, passage: Passage) -> Tensor:
        """The hidden states (n, D) on one of the passages that were read."""
        states: Tensor = self.file.get_tensor(str(passage.number))
        return states

    def head(self, plan: Plan) -> Head:
        """The reference's logits (1, n, V) from its hidden states (1, n, D).

        plan: that of the process, which keeps its threads and ranks.
        """
        config, defaults = parse(self.about.argv), type(plan.config)
        unused = {name: getattr(defaults(), name) for name in ("save", "expert_memory", *EXPERTS)}
        own_process = {name: getattr(plan.config, name) for name in ("threads", "tp")}
        config = dataclasses.replace(config, **unused, **own_process, num_layers=1)
        own = make_plan(config)
        split = plan.split and own.split and dataclasses.replace(own.split, ranks=plan.split.ranks)
        loading = Loading(own.config, own.spec, own.device, own.tokenizer, split, own.checkpoint)
        model = loading.load(lambda done, total: None, lambda line: None)
        model.layers, model.tok_embeddings = nn.ModuleList(), nn.Embedding(0, 0)
        device = own.device
        return lambda x: model.logits(x.to(device))
