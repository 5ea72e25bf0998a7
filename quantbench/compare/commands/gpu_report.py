"""quantbench gpu_report: everything about one card, in steps that can be resumed.

    make gpu-report                                         # on a machine with an NVIDIA card
    quantbench gpu_report --dry_run                  # the steps, their commands and minutes
    quantbench gpu_report --device cpu --checkpoint_path tiny --short --steps caches

Tests marked gpu, then KV caches, a few schemes with as many processes as verdicts need, every
scheme on each model with one process (a speed, no verdict), layers against the limit of memory, and
prompts, into docs/data/CARD/. A step whose file exists is skipped: after an interruption, or when
--minutes are over, the same command goes on. Delete a file to measure it anew.
"""

import dataclasses
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from quantbench import files
from quantbench.cli import Command, say
from quantbench.compare import steps as series
from quantbench.compare.arguments import names_of, refuse_given
from quantbench.compare.figures.block_errors import LEAST_BLOCKS
from quantbench.compare.steps import Outcome, Step
from quantbench.errors import LogError, QuantbenchError, UsageError
from quantbench.log import about as origin
from quantbench.log import shell
from quantbench.quantize import spec
from quantbench.text import aligned, counted

MODELS = ("dummy:Meta-Llama-3-8B", "dummy:Llama-2-7b-chat-hf")
# What decodes a 4-bit weight, an 8-bit one and a plain one; prompts multiply by them, too.
PROMPT_SCHEMES = ("none", "int8wo", "int4wo-64", "fp6")
PROMPT_TOKENS = (2048, 8192)
TOGETHER = 8  # schemes of one comparison, so that an interruption loses minutes
VERDICT_PROCESSES = LEAST_BLOCKS  # of each arm: with fewer there are ranges and no verdicts
NEEDS_TORCH = (2, 11)
# Prints one JSON object about the device: its name, and what of our needs is installed.
PROBE = """
import importlib.util, json, torch
found = [name for name in ("torchao", "triton", "bitsandbytes") if importlib.util.find_spec(name)]
card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps({"torch": torch.__version__, "card": card, "found": found}))
"""


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is measured in each step."""

    minutes: float  # times the steps' own
    prompt_tokens: tuple[int, ...]
    depth: int  # positions in the caches
    attention_rounds: int
    overview_minutes: float  # --max_minutes of ab where every arm has one process
    verdict_minutes: float  # the same where arms have VERDICT_PROCESSES
    sampling: tuple[str, ...]  # options of ab


FULL = Effort(1.0, PROMPT_TOKENS, 32768, 15, 0.5, 2.0, ("--max_new_tokens", "100", "--compile"))
SHORT = Effort(0.5, (64,), 256, 1, 0.02, 0.1, ("--max_new_tokens", "3"))


@click.command(cls=Command)
@click.option("--device", default="cuda", help="cuda, or cpu to try the steps out [cuda]")
@click.option("--checkpoint_path", metavar="A,B", help=f"Models [{','.join(MODELS)}]")
@click.option("--schemes", metavar="A,B", help="Schemes to compare [all but autoquant]")
@click.option(
    "--steps",
    "wanted",
    metavar="A,B",
    help="Only steps whose names are, or begin with, these [all]",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0),
    default=20.0,
    help="Begin no step that may not end within so many [20]",
)
@click.option("--output", metavar="DIR", help="Where the JSON files go [docs/data/CARD]")
@click.option(
    "--work",
    default="build/gpu_report",
    metavar="DIR",
    help="Where unfinished files lie [build/gpu_report]",
)
@click.option("--short", is_flag=True, help="Measure next to nothing: to see that the steps work")
@click.option("--dry_run", is_flag=True, help="Show the steps; run nothing")
@click.option("--debug", is_flag=True, help="Show tracebacks")
@click.pass_context
def gpu_report(
    context: click.Context,
    /,
    device: str,
    checkpoint_path: str | None,
    schemes: str | None,
    wanted: str | None,
    minutes: float,
    output: str | None,
    work: str,
    short: bool,
    dry_run: bool,
    debug: bool,
) -> None:
    """Test and measure one card, and keep what was measured as JSON."""
    if not (series.ROOT / "tests").is_dir():
        raise UsageError("gpu_report runs the tests of a checkout, and this is an installed copy")
    models = names_of("--checkpoint_path", checkpoint_path, MODELS)
    chosen = [str(spec.parse(name)) for name in names_of("--schemes", schemes, spec.SHOWN)]
    every = list(planned(device, models, chosen, SHORT if short else FULL))
    steps = _wanted(every, wanted)
    scratch = Path(work)
    if dry_run:
        refuse_given(context, ("output", "minutes"), "--dry_run runs nothing: leave it out")
        rows = [(s.name, f"{s.minutes:.1f} min", s.shown(scratch)) for s in steps]
        click.echo(aligned([("step", "about", "command"), *rows], left={0, 2}))
        click.echo(f"{counted(len(steps), 'step')}, {sum(s.minutes for s in steps):.0f} minutes")
        return
    files.check_folder("--work", scratch)
    if output is not None:
        files.check_folder("--output", output)
    card = _card(device)
    folder = Path(output) if output else Path("docs/data") / slug(card)
    say(f"{card}: {counted(len(steps), 'step')} into {folder}")
    outcomes = series.run(steps, folder, scratch / slug(card), minutes)
    click.echo(summary(card, folder, outcomes))
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    left = [outcome for outcome in outcomes if outcome.state == "left"]
    if left:
        say(f"{counted(len(left), 'step')} left: the same command goes on")
    sys.exit(1 if failed or left else 0)


def planned(
    device: str, models: Sequence[str], schemes: Sequence[str], effort: Effort
) -> Iterator[Step]:
    """The steps, in the order of their use to somebody whose time ends early."""
    tests = ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider")
    yield Step(
        "tests",
        (*tests, "--junitxml={work}/tests.xml", "tests"),
        3.0,
        "tests.xml",
        accepted=(0, 1, 5),  # all pass, some fail, none was collected
        convert=tests_json,
    )
    compare = ("-m", "quantbench")
    on = ("--device", device)
    yield _json_step("caches", effort.minutes, (
        *compare, "caches", *on, "--checkpoint_path", models[0],
        "--context_depth", str(effort.depth), "--rounds", str(effort.attention_rounds),
    ))  # fmt: skip
    plain = spec.COMPARED_BRIEFLY[0]
    candidates = [scheme for scheme in schemes if scheme != plain]
    brief = [scheme for scheme in spec.COMPARED_BRIEFLY if scheme in {plain, *schemes}]
    yield _ab_step(
        "verdicts", 4 * effort.minutes, models[0], device, brief, effort,
        "--max_minutes", f"{effort.verdict_minutes:g}", processes=VERDICT_PROCESSES,
    )  # fmt: skip
    overview = ("--max_minutes", f"{effort.overview_minutes:g}")
    groups = [candidates[i : i + TOGETHER] for i in range(0, len(candidates), TOGETHER)]
    for path in models:
        for number, group in enumerate(groups, 1):
            name = f"ab-{slug(_model(path))}-{number}"
            arms = [plain, *group]
            yield _ab_step(name, 1.1 * effort.minutes, path, device, arms, effort, *overview)
    # Layers are timed alone; the whole model stands in the comparisons above.
    layers = [s for s in candidates if not isinstance(spec.parse(s), spec.Int8Embedding)]
    yield _json_step("roofline", 1.5 * effort.minutes, (
        *compare, "roofline", *on, "--checkpoint_path", models[0], "--parts", "layers",
        "--schemes", ",".join(layers),
    ))  # fmt: skip
    prompted = [scheme for scheme in PROMPT_SCHEMES if scheme in {plain, *schemes}]
    for tokens in effort.prompt_tokens:
        yield _ab_step(
            f"prompts-{tokens}", 0.8 * effort.minutes, models[0], device, prompted, effort,
            *overview, "--prefill_size", str(tokens), "--max_new_tokens", "2",
        )  # fmt: skip


def _json_step(name: str, minutes: float, command: tuple[str, ...]) -> Step:
    return Step(name, (*command, "--json", f"{{work}}/{name}.json"), minutes, f"{name}.json")


def _ab_step(
    name: str,
    minutes: float,
    path: str,
    device: str,
    schemes: Sequence[str],
    effort: Effort,
    *more: str,
    processes: int = 1,  # of each arm
) -> Step:
    arms = [word for scheme in schemes for word in ("--arm", f"--quantization {scheme}")]
    command = (
        *("-m", "quantbench", "ab", *arms, "--checkpoint_path", path, "--device", device),
        *("--tokens", "0", "--processes", str(processes), *effort.sampling, *more),
        *("--write_result", "none", "--output", f"{{work}}/{name}"),
    )
    return Step(
        name,
        command,
        minutes,
        f"{name}/results.json",
        accepted=(0, 1),  # all arms were measured, some failed
        convert=compared_json,
    )


def compared_json(path: Path, command: tuple[str, ...]) -> str:
    """What ab wrote. Raises QuantbenchError where it came to no end, or has no baseline."""
    rows = files.read_json("cannot read", path, QuantbenchError).get("rows")
    if not rows:
        raise QuantbenchError("ab came to no end")
    if rows[0]["failed"]:
        raise QuantbenchError(f"the baseline failed: {rows[0]['failed']}")
    return path.read_text()


def tests_json(path: Path, command: tuple[str, ...]) -> str:
    """What pytest's JUnit XML says: how many tests passed, were skipped and failed, and which."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    kinds: dict[str, list[str]] = {"failed": [], "skipped": []}
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            kinds["failed"].append(name)
        elif case.find("skipped") is not None:
            kinds["skipped"].append(name)
    about = dataclasses.replace(origin.about(), command=shell.join(["python", *command]))
    value = {
        "about": dataclasses.asdict(about),
        "passed": len(cases) - sum(map(len, kinds.values())),
        "skipped": len(kinds["skipped"]),
        "failed": kinds["failed"],
    }
    return json.dumps(value, indent=1) + "\n"


def slug(name: str) -> str:
    """A name for folders and files: NVIDIA H100 80GB HBM3 → nvidia-h100-80gb-hbm3."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _model(path: str) -> str:
    return path.removeprefix("dummy:").rstrip("/").rpartition("/")[2]


def _wanted(steps: Sequence[Step], text: str | None) -> list[Step]:
    """The steps that --steps "A,B" names, by their whole names or by how these begin."""
    if text is None:
        return list(steps)
    chosen = []
    for name in names_of("--steps", text, ()):
        named = [step for step in steps if step.name == name or step.name.startswith(f"{name}-")]
        if not named:
            known = ", ".join(step.name for step in steps)
            raise UsageError(f"--steps {name}: there are {known}")
        chosen += named
    return [step for step in steps if step in chosen]


def _card(device: str) -> str:
    """The device's name. Raises QuantbenchError, with what is missing, where a run would fail."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise QuantbenchError(f"torch cannot be imported here: {reason}")
    probe: dict[str, Any] = json.loads(done.stdout)
    version = tuple(int(number) for number in re.findall(r"\d+", probe["torch"])[:2])
    if version < NEEDS_TORCH:
        raise QuantbenchError(f"torch {probe['torch']} is here; 2.11 or newer is needed")
    if "torchao" not in probe["found"]:
        raise QuantbenchError("torchao is missing: pip install torchao")
    if device == "cpu":
        return "cpu"
    if probe["card"] is None:
        raise QuantbenchError(
            "torch finds no CUDA card here; --device cpu --short tries the steps out without one"
        )
    if "bitsandbytes" not in probe["found"]:
        say("bitsandbytes is not installed: its kernels and their tests are left out")
    return str(probe["card"])


# ---------------------------------------------------------------------------------- the summary


def summary(card: str, folder: Path, outcomes: Sequence[Outcome]) -> str:
    """What the files say: the tests, the schemes of each comparison, and what is missing."""
    lines = [card]
    for outcome in outcomes:
        path = outcome.step.file(folder)
        if not path.exists():
            lines.append(f"{outcome.step.name}: {outcome.state}: {outcome.reason}")
            continue
        value = files.read_json("cannot read", path, LogError)
        said = f"{outcome.step.name}: {path}"
        if outcome.step.name == "tests":
            said += f": {value['passed']} passed, {value['skipped']} skipped, "
            said += f"{len(value['failed'])} failed {' '.join(value['failed'])}"
        lines.append(said.rstrip())
        if rows := [_row(row) for row in value.get("rows", []) if "tok_s" in row]:
            headings = ("  scheme", "tok/s", "prefill tok/s", "decode tok/s", "verdict")
            lines.append(aligned([headings, *rows], left={0, 4}))
    return "\n".join(lines)


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = (row.get(name) for name in ("tok_s", "prefill_tok_s", "decode_tok_s"))
    shown = ["-" if number is None else f"{number:.1f}" for number in numbers]
    return (f"  {row.get('scheme') or row.get('arm', '')}", *shown, str(row.get("verdict", "")))
