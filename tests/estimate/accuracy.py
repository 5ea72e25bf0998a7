"""How good the estimator is on this machine: measured cases that no calibration has seen.

    python -m tests.estimate.accuracy measure FOLDER --minutes 4   # resumable: repeat until done
    python -m tests.estimate.accuracy memory FOLDER                # peak memory; needs no quiet
    python -m tests.estimate.accuracy report FOLDER --json docs/data/estimate_accuracy.json
    python -m tests.estimate.accuracy renew FOLDER --json docs/data/estimate_accuracy.json
    python -m tests.estimate.accuracy report docs/data/estimate_accuracy.json   # from it alone

`measure` measures what every scheme needs, then takes one scheme after another. Machines drift, so
a scheme's calibration, which `calibrate` makes in rounds, and the cases of the scheme take turns:
a round of the one, a round of the other. Before and after every sample stands a reading of memory
and of arithmetic, and the estimate of a case is of a machine of that speed; the report also has the
errors without that correction. Nothing is fitted to a case.

The models have widths that no calibration model has, and fewer layers than published so that a
sitting takes minutes. `measure` stops at the time that it is given, and another call goes on.
`memory` runs generate.py, and compares its peak of resident memory; `renew` puts these runs alone
into the file of an earlier report. The file holds the calibration and all samples; `report` of it
computes the estimates and their errors anew.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

from quantbench.run import environment

environment.prepare()

from quantbench.compare.sampling.resting import left_behind, resting_bytes  # noqa: E402
from tests.estimate import accuracy_report  # noqa: E402

# Name: (checkpoint, layers). "own" is a shape of no published model.
MODELS = {
    "Llama-3.2-1B": ("dummy:Llama-3.2-1B", 2),
    "Qwen3-0.6B": ("dummy:Qwen3-0.6B", 2),
    "TinyLlama-1.1B": ("dummy:TinyLlama-1.1B-Chat-v1.0", 3),
    "own": (f"dummy:{Path(__file__).parent}/own_shape.json", 3),
}
SCHEMES = ("none", "int8wo", "int4wo-128", "fp6", "sparse-marlin", "uintx-2-64")
DEEP = 8192
STEPS = ((1, 0), (4, DEEP), (16, 0), (1, DEEP), (4, 0), (16, DEEP))  # batch, positions before it
PROMPTS = ((1, 128), (4, 128), (16, 128), (1, 1024), (4, 1024))  # batch, positions
EACH_STEPS, EACH_PROMPTS = 3, 2  # of these, for each model in each scheme, in turn
LONGEST = (16, 1024)  # some seconds each: of these models and schemes
LONGEST_OF = (("TinyLlama-1.1B", "none"), ("Llama-3.2-1B", "int4wo-128"))
MEMORY_RUNS = 3  # of each, of which the median counts: two differ by 25 MB
# Batch and prompt of the runs whose memory is compared, in turn.
MEMORY = (
    (1, 128),
    (4, 1024),
    (16, 128),
    (1, 1024),
)


def cases(scheme: str, model: str) -> list[tuple[str, int, int]]:
    """(kind, batch, positions): of a prompt its length, of a step the depth before it."""
    turn = SCHEMES.index(scheme) + list(MODELS).index(model)
    steps = [STEPS[(turn * EACH_STEPS + i) % len(STEPS)] for i in range(EACH_STEPS)]
    prompts = [PROMPTS[(turn * EACH_PROMPTS + i) % len(PROMPTS)] for i in range(EACH_PROMPTS)]
    if (model, scheme) in LONGEST_OF:
        prompts.append(LONGEST)
    return [("token", *step) for step in steps] + [("prompt", *prompt) for prompt in prompts]


def configs():
    from quantbench.models.loading import load_config

    return {
        name: dataclasses.replace(load_config(path).with_layers(layers), name=name)
        for name, (path, layers) in MODELS.items()
    }


# ---------------------------------------------------------------------------------- measuring


def measure(folder: Path, minutes: float) -> None:
    """Go on with what is missing; no scheme is begun after so many minutes."""
    import torch

    from quantbench.compare.commands.calibrate import make_generator
    from quantbench.estimate import machine
    from quantbench.estimate.probe import Probe, Settings
    from quantbench.typed_json import to_json

    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    settings = Settings(torch.device("cpu"), torch.bfloat16, SCHEMES)
    probe = Probe(settings.device, settings.precision)
    for scheme in ("every", *SCHEMES):
        path = folder / f"{scheme}.json"
        if path.exists():
            continue
        begun = time.monotonic()
        if begun - started > 60 * minutes:
            sys.exit("more to measure: call again")
        subjects = None
        if scheme == "every":
            part = to_json(machine.of_every_scheme(settings, probe))
        else:
            subjects = Subjects(scheme, settings, make_generator, probe)
            of_scheme = machine.of_scheme(scheme, settings, make_generator, probe, subjects.round)
            part = {**to_json(of_scheme), "cases": to_json(subjects.samples)}
        seconds = time.monotonic() - begun
        calibrating = seconds - (subjects.took if subjects else 0.0)
        path.write_text(json.dumps({**part, "calibrating_seconds": calibrating}))
        print(f"{scheme}: {seconds:.0f} s, calibrating {calibrating:.0f} s", flush=True)
    print("complete")


class Subjects:
    """The models of the cases in one scheme, which are measured a round at a time."""

    def __init__(self, scheme, settings, make_generator, probe) -> None:
        from quantbench.estimate import machine

        self.scheme = scheme
        started, shapes = time.monotonic(), configs()
        table = machine.embedding(shapes.values(), settings)
        models = {
            name: machine.random_model(config, scheme, settings, table)[0]
            for name, config in shapes.items()
        }
        self.rounds = machine.Rounds(models, scheme, make_generator, probe)
        self.samples: list[object] = []
        self.number = 0
        self.took = time.monotonic() - started  # seconds for cases, and not for the calibration

    def round(self) -> None:
        """Every case, that of one model next to those of the others; steps before and after the
        prompts, as in a round of the calibration."""
        started = time.monotonic()
        each = {name: cases(self.scheme, name) for name in MODELS}
        every = list(dict.fromkeys(case for some in each.values() for case in some))
        steps = [case for case in every if case[0] == "token"]
        prompts = [case for case in every if case[0] == "prompt"]
        for case in (*steps, *prompts, *steps):
            for name in MODELS:
                if case in each[name] and not (case[1:] == LONGEST and self.number):
                    self.samples.append(self._sample(name, *case))
        self.number += 1
        self.took += time.monotonic() - started

    def _sample(self, name: str, kind: str, batch: int, positions: int):
        if kind == "token":
            return self.rounds.step(name, batch, positions)
        return self.rounds.prompt(name, batch, positions)


# ---------------------------------------------------------------------------------- memory


def memory(folder: Path, run: Callable[..., object] = subprocess.run) -> None:
    """Runs of generate.py, with the peak of their resident memory; resumable."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "memory.json"
    if path.exists():
        rows = json.loads(path.read_text())
    else:
        resting = resting_bytes("cpu", "bfloat16", SCHEMES[0])
        left = left_behind("bfloat16", SCHEMES[0], resting)
        rows = {"base_bytes": resting, "left_behind": dataclasses.asdict(left), "runs": []}
    known = {(row["model"], row["scheme"], row["batch"]) for row in rows["runs"]}
    for scheme in SCHEMES:
        for turn, (name, (checkpoint, layers)) in enumerate(MODELS.items()):
            batch, prompt = MEMORY[(turn + SCHEMES.index(scheme)) % len(MEMORY)]
            if (name, scheme, batch) in known:
                continue
            with tempfile.TemporaryDirectory() as scratch:
                out = Path(scratch) / "run.json"
                options = {
                    "checkpoint_path": checkpoint, "num_layers": layers, "quantization": scheme,
                    "batch_size": batch, "prefill_size": prompt, "max_new_tokens": 8,
                    "num_samples": 2, "device": "cpu", "write_result": "none",
                    "output_json_path": out,
                }  # fmt: skip
                words = [str(w) for key, value in options.items() for w in (f"--{key}", value)]
                peaks = []
                for _ in range(MEMORY_RUNS):
                    run([sys.executable, "generate.py", *words], check=True)
                    found = json.loads(out.read_text())
                    peaks.append(found["peak_memory_bytes"]["generate"]["resident"])
                    out.unlink()  # runs are appended
            row = {
                "model": name,
                "scheme": scheme,
                "layers": layers,
                "batch": batch,
                "prompt": prompt,
                "new_tokens": 8,
                "cache_size": found["cache_size"],
                "peak_bytes": statistics.median(peaks),
                "peaks": peaks,
            }
            rows["runs"].append(row)
            path.write_text(json.dumps(rows, indent=1))
            print(json.dumps(row), flush=True)


@click.command(help=__doc__)
@click.argument("what", type=click.Choice(["measure", "memory", "report", "renew"]))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--minutes", default=4.0, show_default=True, help="After which no scheme is begun")
@click.option("--json", "json_path", metavar="PATH", help="Of report: all of it, here too")
def main(what: str, folder: Path, minutes: float, json_path: str | None) -> None:
    if what == "measure":
        measure(folder, minutes)
    elif what == "memory":
        memory(folder)
    elif what == "renew":
        assert json_path is not None, "--json names the file of a report"
        accuracy_report.renew_memory(folder, json_path, configs())
    else:
        accuracy_report.report(folder, json_path, configs(), SCHEMES)


if __name__ == "__main__":
    main()
