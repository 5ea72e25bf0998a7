"""The documentation's tables of runs that nobody here has measured: each figure is an estimate,
computed anew whenever documents are written or checked."""

from collections.abc import Sequence
from dataclasses import dataclass

from quantbench.answer import estimating
from quantbench.errors import UsageError
from quantbench.estimate.predict import Estimate, Request, predict
from quantbench.log import shell
from quantbench.report.columns import Columns, markdown, number

USAGE = "predictions MODEL DEVICE RANKS PROMPT_TOKENS SCHEMES BATCH_SIZES"


@dataclass(frozen=True)
class _Row:
    batch: int
    estimate: Estimate


COLUMNS: Columns[_Row] = [
    ("scheme", lambda row: row.estimate.scheme),
    ("sequences", lambda row: str(row.batch)),
    ("prompt, ms", number(lambda row: 1e3 * row.estimate.prompt_seconds.value, ".0f")),
    ("token, ms", number(lambda row: 1e3 * row.estimate.token_seconds.value, ".1f")),
    ("of it links, ms", number(lambda row: 1e3 * row.estimate.parts["token"]["links"], ".1f")),
    ("new tokens/s", number(lambda row: row.estimate.tokens_per_second.value, ".0f")),
    ("memory of each card, GB", number(lambda row: _gigabytes(row.estimate), ".1f")),
    ("J/token, at most", number(lambda row: row.estimate.joules_per_token.value, ".1f")),
]


def predictions(words: Sequence[str]) -> str:
    """predictions MODEL DEVICE RANKS PROMPT_TOKENS SCHEMES BATCH_SIZES: 128 new tokens behind a
    prompt; underscores for the spaces in the device's name, commas in the lists."""
    if len(words) != len(USAGE.split()) - 1:
        raise UsageError(f"a table of predictions is {USAGE}; given: {' '.join(words)}")
    model, device, ranks, prompt, schemes, sizes = words
    machine_name = device.replace("_", " ")
    machine = estimating.machine_of(machine_name)
    config = estimating.model_of(model, None)
    rows = []
    for size in map(int, sizes.split(",")):
        for scheme in schemes.split(","):
            request = Request(config, scheme, batch=size, prompt=int(prompt), tp=int(ranks))
            rows.append(_Row(size, predict(request, machine)))
    options = {"checkpoint_path": model, "device": machine_name, "tp": ranks}
    options |= {"sequence_length": prompt, "new_tokens": str(Request.new_tokens)}
    options |= {"batch_size": str(rows[-1].batch), "quantization": rows[-1].estimate.scheme}
    given = [word for name, value in options.items() for word in (f"--{name}", value)]
    command = shell.join(["quantbench", "estimate", *given])
    caption = f"<sub>Estimates: nothing of this was measured. The last row: `{command}`</sub>"
    return f"{markdown(COLUMNS, rows)}\n\n{caption}"


def _gigabytes(estimate: Estimate) -> float:
    return estimate.peak_memory_bytes.value / 1e9
