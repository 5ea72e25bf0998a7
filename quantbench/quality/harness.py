"""lm-evaluation-harness on our models; `pip install lm-eval` is what it needs.

Its tasks ask three things of a model: how likely a continuation is, how likely a whole text is, and
what it would go on with. Everything runs through a KV cache of the plan's kind, a row at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantbench.errors import QuantbenchError
from quantbench.generate import Generator
from quantbench.models.llama import Transformer
from quantbench.quality.tasks import Tasks
from quantbench.run.plan import Plan
from quantbench.run.scoring import token_nats

MOST_NEW_TOKENS = 256  # where a task does not say
WINDOW = 1024  # positions, of which each token sees at least half


def evaluate(
    plan: Plan,
    model: Transformer,
    tasks: Tasks,
    limit: int | None,
    say: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    """For each task its metrics, named as the harness names them: "acc,none", "acc_stderr,none".

    Raises QuantbenchError for tasks that it cannot load.
    """
    from lm_eval import simple_evaluate

    say(f"lm-evaluation-harness: {', '.join(tasks.names)} …")
    names = [os.path.abspath(task) if Path(task).is_file() else task for task in tasks.names]
    adapter = _adapter(plan, model)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            answer = simple_evaluate(
                model=adapter, tasks=names, limit=limit, task_manager=tasks.manager
            )
    except (KeyError, ValueError, OSError, AssertionError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise QuantbenchError(f"--lm_eval {','.join(tasks.names)}: {reason}") from error
    assert answer is not None
    return {
        task: {name: value for name, value in figures.items() if isinstance(value, int | float)}
        for task, figures in answer["results"].items()
    }


def _adapter(plan: Plan, model: Transformer) -> Any:
    from lm_eval.api.model import TemplateLM

    tokenizer, device, most = plan.tokenizer, plan.device, plan.architecture.max_position

    class Adapter(TemplateLM):  # type: ignore[misc]
        """Our model as the harness calls it, which sets the methods' names and arguments."""

        @property
        def eot_token_id(self) -> int:
            return min(tokenizer.eos_ids, default=0)

        @property
        def prefix_token_id(self) -> int:
            return self.eot_token_id if tokenizer.bos_id is None else tokenizer.bos_id

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **more: Any
        ) -> list[int]:
            return tokenizer.encode(string, bos=add_special_tokens is not False)

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[Any, list[int], list[int]]], **more: Any
        ) -> list[tuple[float, bool]]:
            """Sum of log-probabilities of each continuation, and whether it is the likeliest."""
            rows = [(ids + more_ids)[-most - 1 :] for _, ids, more_ids in requests]
            longest = max(map(len, rows), default=1)
            generator = Generator(model, 1, longest, plan.kv_cache)
            likelihoods = []
            for row, (_, _, continuation) in zip(rows, requests, strict=True):
                ids = torch.tensor(row, device=device)
                logits = generator.forward(ids[None, :-1])[0, -len(continuation) :]
                likelihoods.append(_likelihood(logits, ids[-len(continuation) :]))
            return likelihoods

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            """Sum of log-probabilities of each text, in windows."""
            sums = []
            for (text,) in (request.args for request in requests):
                ids = [self.prefix_token_id, *tokenizer.encode(text, bos=False)]
                tokens = torch.tensor(ids, device=device)
                forward = Generator(model, 1, WINDOW, plan.kv_cache).forward
                some = len(ids) > 1  # else there is nothing to predict
                nats = token_nats(forward, tokens, min(WINDOW, most)) if some else torch.zeros(1)
                sums.append(-nats.sum().item())
            return sums

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            """The likeliest continuation of each text, up to the first of its stops."""
            return [self._continue(*request.args) for request in requests]

        def _continue(self, text: str, asked: Mapping[str, Any]) -> str:
            stops = asked.get("until") or []
            stops = [stops] if isinstance(stops, str) else list(stops)
            count = min(int(asked.get("max_gen_toks", MOST_NEW_TOKENS)), most - 1)
            ids = self.tok_encode(text)[-(most - count) :]
            generator = Generator(model, 1, len(ids) + count, plan.kv_cache)
            new: list[int] = []
            for token in generator.stream(torch.tensor([ids], device=device)):
                new.append(int(token))
                said = tokenizer.decode([*ids, *new])[len(tokenizer.decode(ids)) :]
                ended = new[-1] in tokenizer.eos_ids or len(new) == count
                if ended or any(stop in said for stop in stops):
                    break
            return said[: min([len(said), *(said.find(s) for s in stops if s in said)])]

    return Adapter()


def _likelihood(logits: Tensor, targets: Tensor) -> tuple[float, bool]:
    logs = logits.double().log_softmax(-1).gather(-1, targets[:, None])
    return logs.sum().item(), bool((logits.argmax(-1) == targets).all())
