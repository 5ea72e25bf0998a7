"""quantbench estimate: what a run will cost, here or on a card that one does not have.

quantbench estimate --checkpoint_path tiny --quantization int8wo
quantbench estimate --checkpoint_path tiny --device "NVIDIA L4" --all_schemes
quantbench estimate --checkpoint_path dummy:Llama-3.1-8B --device L4 --what_fits 24GB
quantbench estimate --checkpoint_path dummy:Meta-Llama-3-8B --device A100 --calibration log.txt
quantbench estimate --validate results.json more.json     # estimates against what was measured
"""

from typing import Any

import click

from quantbench import environment, files
from quantbench.cli import Command
from quantbench.errors import UsageError
from quantbench.help_text import refuse_beside, refuse_given
from quantbench.kv_cache import CACHES
from quantbench.log.config import PRECISIONS
from quantbench.log.kinds import ByteSize, OneOf, Whole
from quantbench.log.origin import report_output, write_json
from quantbench.progress import say
from quantbench.text import shown

OF_VALIDATING = ("words", "validate", "debug")


@click.command(cls=Command)
@click.argument("words", metavar="[FILE...]", nargs=-1)
@click.option("--checkpoint_path", metavar="PATH",
              help="The model, as in generate.py, or its config.json")  # fmt: skip
@click.option("--device", metavar="NAME", default="here", help="here, or the name of a card [here]")
@click.option("--quantization", default="none", metavar="SCHEME", help="Quantization [none]")
@click.option("--kv_cache", type=OneOf(tuple(CACHES)), default="dense",
              help=f"KV cache: {', '.join(CACHES)} [dense]")  # fmt: skip
@click.option("--precision", type=OneOf(PRECISIONS), default="bfloat16",
              help=f"Unquantized dtype: {', '.join(PRECISIONS)} [bfloat16]")  # fmt: skip
@click.option("--batch_size", type=Whole(1), default=1, help="Sequences at once [1]")
@click.option("--sequence_length", type=Whole(1), default=128, help="Prompt tokens [128]")
@click.option("--new_tokens", type=Whole(0), default=128,
              help="Tokens to generate; 0: the prompt alone [128]")  # fmt: skip
@click.option("--context_depth", type=Whole(0), default=0, help="Tokens already cached [0]")
@click.option("--num_layers", type=Whole(1), help="Only the first N layers")
@click.option("--tp", type=Whole(1), default=1, help="Devices that share the model [1]")
@click.option("--all_schemes", is_flag=True, help="Estimate every scheme, a row each")
@click.option("--what_fits", type=ByteSize(1e6), help="Schemes that fit into 24GB, and how deep")
@click.option("--calibration", metavar="FILE",
              help="Runs that tell a card's speed: a log, or results in JSON")  # fmt: skip
@click.option("--calibrated_on", metavar="NAME", help="The card of --calibration's runs [--device]")
@click.option("--validate", metavar="FILE",
              help="Results to hold estimates against; more files may follow")  # fmt: skip
@click.option("--json", "json_path", metavar="PATH", help="Write all of it here, too")
def estimate(
    words: tuple[str, ...],
    all_schemes: bool,
    what_fits: int | None,
    validate: str | None,
    json_path: str | None,
    **given: Any,
) -> None:
    """Estimate seconds, memory, energy and tokens per second, each with its source; or hold
    estimates against results."""
    inputs = {f"--{name}": given[name] for name in ("checkpoint_path", "calibration")}
    inputs |= {"--validate": validate}
    inputs |= {f"FILE {number}": path for number, path in enumerate(words, 1)}
    files.check_outputs([report_output(json_path)], inputs)
    if validate is not None:
        refuse_beside(OF_VALIDATING, "--validate reads what was measured: leave it out")
        environment.prepare()
        from quantbench.estimate.answer import run_estimator
        from quantbench.estimate.validate import of_results, report

        estimator = run_estimator()
        cases = [case for path in (validate, *words) for case in of_results(path, estimator)]
        click.echo(report(cases), nl=False)
    elif words:
        raise UsageError(f"estimate takes --validate FILE; given: {shown(words[0])}")
    elif given["checkpoint_path"] is None:
        raise UsageError(
            "estimate takes --checkpoint_path PATH or --validate FILE; nothing is given"
        )
    else:
        if all_schemes and what_fits is not None:
            raise UsageError("--all_schemes and --what_fits are two tables: leave one of them out")
        if all_schemes or what_fits is not None:
            every = ["quantization"]
            if what_fits is not None:
                every += ["kv_cache", "sequence_length", "new_tokens", "context_depth"]
            refuse_given(every, "the table has them all: leave it out")
        environment.prepare()
        from quantbench.estimate.options import predicted

        text, value = predicted(**given, all_schemes=all_schemes, memory=what_fits)
        if json_path:  # before stdout, which may be closed
            write_json(json_path, value)
            say(f"Wrote {json_path}")
        click.echo(text)
