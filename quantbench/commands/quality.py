"""quantbench quality: what a scheme costs in quality, against full precision.

quantbench quality --quantization int4wo-64
quantbench quality --quantization int4wo-64 --kv_cache int8 --text FILE --tokens 0
quantbench quality --quantization int4wo-64 --lm_eval hellaswag,my_task.yaml
"""

import click

from quantbench import files
from quantbench.cli import Command
from quantbench.errors import UsageError
from quantbench.log.config import NOT_IN_ARMS, RunConfig
from quantbench.log.kinds import Whole
from quantbench.log.options import options
from quantbench.log.origin import report_output, write_json
from quantbench.quality import tables
from quantbench.quality.tasks import find
from quantbench.quality.thresholds import FIRST_TOKENS, KL, MAX_KL, MOST_TOKENS, SCALE, check_tokens
from quantbench.run import checks

SAMPLING = ("num_samples", "max_new_tokens", "top_k", "temperature", "prompt", "prefill_size")
# What changes no figure: rows and positions at once, ranks, and where experts lie.
FREE = (
    *("batch_size", "cache_size", "context_depth", "prefill_chunk", "tp"),
    *("expert_memory", *checks.EXPERTS),
)
UNUSED = {*NOT_IN_ARMS, *SAMPLING, *FREE, "compile", "compile_prefill"} - {"debug"}


@click.command(cls=Command)
@click.option("--text", help="A text to predict, instead of prose, code and the model's own")
@click.option("--tokens", type=Whole(0),
              help="Predict N tokens; 0: all [until it is clear on which side of --max_kl the "
              f"scheme is, {FIRST_TOKENS} to {MOST_TOKENS}]")  # fmt: skip
@click.option("--max_kl", type=KL, default=MAX_KL, metavar="NATS",
              help=f"The KL divergence that is good enough [{MAX_KL}]; {SCALE}")  # fmt: skip
@click.option("--lm_eval", metavar="TASKS", help="Tasks of lm-evaluation-harness, or their .yaml")
@click.option("--limit", type=Whole(1), help="Take only the first N documents of each task")
@click.option("--answers", is_flag=True, help="Measure lengths of answers, and how many loop")
@click.option("--json", "json_path", metavar="PATH", help="Write all of it here, every layer too")
@click.option("--tp", hidden=True)
@options(without=UNUSED)
def quality(
    text: str | None,
    tokens: int | None,
    max_kl: float,
    lm_eval: str | None,
    limit: int | None,
    answers: bool,
    json_path: str | None,
    tp: str | None,
    config: RunConfig,
) -> None:
    """Measure how well a scheme predicts, how far it is from full precision, and where it errs."""
    if limit is not None and lm_eval is None:
        raise UsageError("--limit is of the documents of --lm_eval's tasks: name some, or leave it")
    if tp is not None:
        raise UsageError("--tp: quality is the same on any number of ranks; leave it out")
    if config.checkpoint_path.startswith("dummy:"):
        raise UsageError(
            f"--checkpoint_path {config.checkpoint_path}: random weights have none; without this "
            "option the scheme is measured on the embedded model"
        )
    checks.check_options(config)
    check_tokens(tokens or 0)
    if text is not None:
        files.read_text("--text", text)
    files.check_outputs(
        [report_output(json_path)], {"--text": text, "--calibration_text": config.calibration_text}
    )
    tasks = find(lm_eval) if lm_eval else None
    # torch takes its seconds after the options
    from quantbench.quality.measure import measure

    measured = measure(config, text, tokens, max_kl, tasks, limit, answers)
    write_json(json_path, measured)
    click.echo(tables.report(measured))
