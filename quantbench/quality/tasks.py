"""Tasks of lm-evaluation-harness on our models; `pip install lm-eval` is what it needs.

    tasks = find("hellaswag,my_task.yaml")      # before a model is read, and before torch is
    result = evaluate(plan, model, tasks, limit=100)
    flips(result, of_full_precision)            # documents that were right, or became so

Tasks ask three things of a model: how likely a continuation is, how likely a whole text is, and
what it would go on with. Everything runs through a KV cache of the plan's kind, a row at a time.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantbench.errors import QuantbenchError, UsageError
from quantbench.progress import progress, say
from quantbench.text import shown

if TYPE_CHECKING:
    from quantbench.models.llama import Transformer
    from quantbench.run.plan import Plan

MOST_NEW_TOKENS = 256  # where a task does not say
WINDOW = 1024  # positions, of which each token sees at least half


@dataclass(frozen=True)
class Tasks:
    """Tasks that are there."""

    names: list[str]  # names of the harness, patterns of them, or files
    manager: Any = None  # the harness's TaskManager; None where files need no other task


@dataclass(frozen=True)
class Result:
    figures: dict[str, dict[str, float]]  # by task, as the harness names them: "acc_stderr,none"
    documents: dict[tuple[str, str], list[Any]]  # by task and metric: the value of each


@dataclass(frozen=True)
class Flips:
    """Documents that full precision and a scheme judge differently, in one metric of a task."""

    task: str
    metric: str
    lost: int  # right in full precision alone
    gained: int  # right in the scheme alone
    p: float  # McNemar's exact test: how likely so uneven a split is, if neither is better


def find(text: str) -> Tasks:
    """The tasks of "A,B". Raises UsageError, one line, where the harness or one of them is not
    there."""
    names = [name.strip() for name in text.split(",")]
    if "" in names:
        raise UsageError(f"--lm_eval takes names with commas between them; given: {shown(text)}")
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError("--lm_eval needs lm-evaluation-harness: pip install lm-eval")
    for name in names:
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            raise UsageError(f"--lm_eval {name}: no such file")
    own = [name for name in names if not Path(name).is_file()]
    if not own and not any(map(_has_group, names)):
        return Tasks(names)
    with progress("Looking up the tasks of lm-evaluation-harness", lasting=False):  # seconds
        from lm_eval.tasks import TaskManager

        manager = TaskManager()
    for name in own:
        if not manager.match_tasks([name]):
            close = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f"did you mean {close[0]}?" if close else "`lm-eval ls tasks` lists them"
            raise UsageError(f"--lm_eval {name}: lm-evaluation-harness has no such task; {hint}")
    return Tasks(names, manager)


def _has_group(path: str) -> bool:
    """Whether a task's file may name other tasks."""
    return re.search(r"\bgroup\b", Path(path).read_text("utf-8", "replace")) is not None


def evaluate(plan: Plan, model: Transformer, tasks: Tasks, limit: int | None) -> Result:
    """limit: documents of each task, at most. Raises QuantbenchError for tasks that it cannot
    load."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    say(f"lm-evaluation-harness, {plan.spec}: {', '.join(tasks.names)} …")
    names = [os.path.abspath(task) if Path(task).is_file() else task for task in tasks.names]
    manager = tasks.manager or TaskManager(include_defaults=False)  # all take 20 s to read
    try:
        with (
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            contextlib.redirect_stdout(nowhere),
        ):
            answer: Any = simple_evaluate(
                model=_adapter(plan, model), tasks=names, limit=limit, task_manager=manager
            )
    except (KeyError, ValueError, OSError, AssertionError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise QuantbenchError(f"--lm_eval {','.join(tasks.names)}: {reason}") from error
    figures = {
        task: {name: value for name, value in found.items() if isinstance(value, int | float)}
        for task, found in answer["results"].items()
    }
    documents: dict[tuple[str, str], list[Any]] = {}
    for task, samples in answer["samples"].items():
        for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
            for metric in sample["metrics"]:
                documents.setdefault((task, metric), []).append(sample[metric])
    return Result(figures, documents)


def flips(result: Result, full: Result) -> list[Flips]:
    """The flips of each metric that judges every document right or wrong."""
    from scipy import stats

    found = []
    for (task, metric), own in result.documents.items():
        pairs = list(zip(full.documents[task, metric], own, strict=True))
        if all(value in (0, 1) for pair in pairs for value in pair):
            lost, gained = pairs.count((1, 0)), pairs.count((0, 1))
            p = stats.binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
            found.append(Flips(task, metric, lost, gained, float(p)))
    return found


def _adapter(plan: Plan, model: Transformer) -> Any:
    import torch
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    from quantbench.generate import Generator

    tokenizer, most = plan.tokenizer, plan.architecture.max_position
    window = min(WINDOW, most)

    def tensor(ids: list[int]) -> Any:
        return torch.tensor([ids], device=plan.device)

    class Adapter(TemplateLM):  # type: ignore[misc]
        """Our model as the harness calls it, which sets the methods' names and arguments."""

        eot_token_id = min(tokenizer.eos_ids, default=0)
        prefix_token_id = eot_token_id if tokenizer.bos_id is None else tokenizer.bos_id

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **more: Any
        ) -> list[int]:
            return tokenizer.encode(string, bos=add_special_tokens is not False)

        def _loglikelihood_tokens(self, requests: Any, **more: Any) -> list[tuple[float, bool]]:
            """For each continuation its log-probability, and whether each token is the likeliest"""
            rows = [((ids + own)[-most - 1 :], len(own)) for _, ids, own in requests]
            size = max((len(row) for row, _ in rows), default=1)
            generator, answers = Generator(model, 1, size, plan.kv_cache), []
            for row, count in rows:
                own = torch.tensor(row[-count:], device=plan.device)
                logs = generator.forward(tensor(row[:-1]))[0, -count:].double().log_softmax(-1)
                likelihood = logs.gather(-1, own[:, None]).sum().item()
                answers.append((likelihood, bool((logs.argmax(-1) == own).all())))
            return answers

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            answers = []
            for (text,) in (request.args for request in requests):
                ids = tokenizer.encode(text, bos=False)
                windows = get_rolling_token_windows(ids, self.prefix_token_id, window, window // 2)
                rows = [("", *make_disjoint_window(one)) for one in windows]
                answers.append(sum(value for value, _ in self._loglikelihood_tokens(rows)))
            return answers

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return [self._continued(text, asked) for text, asked in (r.args for r in requests)]

        def _continued(self, text: str, asked: dict[str, Any]) -> str:
            """The likeliest continuation, up to the first of the stops."""
            stops = asked.get("until") or []
            stops = [stops] if isinstance(stops, str) else [stop for stop in stops if stop]
            count = min(int(asked.get("max_gen_toks", MOST_NEW_TOKENS)), most - 1)
            ids = self.tok_encode(text)[-(most - count) :]
            start, new, said = len(tokenizer.decode(ids)), list[int](), ""
            generator = Generator(model, 1, len(ids) + count, plan.kv_cache)
            for token in generator.stream(tensor(ids)):
                new.append(int(token))
                said = tokenizer.decode([*ids, *new])[start:]
                ended = new[-1] in tokenizer.eos_ids or len(new) == count
                if ended or any(stop in said for stop in stops):
                    break
            return min((said.split(stop)[0] for stop in stops), key=len, default=said)

    return Adapter()
