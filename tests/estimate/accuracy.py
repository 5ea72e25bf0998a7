"""How good the estimator is on this machine: measured cases that no calibration has seen.

    python tests/estimate/accuracy.py measure FOLDER --minutes 3    # resumable: repeat until done
    python tests/estimate/accuracy.py report FOLDER --json docs/data/estimate_accuracy.json

`measure` measures what every scheme needs, then takes one scheme after another: it calibrates the
scheme, as `calibrate` does, and times the cases of it. It stops at the time that it is given, and
another call goes on. Everything has to be one sitting with nothing else running, because machines
drift. Beside each case the speed of memory and of arithmetic is read, as beside each measurement of
the calibration: the estimate is of the machine at that speed. The report gives the errors without
this correction, too.

The models have widths that no calibration model has, and fewer layers than published so that a
sitting takes minutes.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from run import environment  # noqa: E402

environment.prepare()

# Name: (checkpoint, layers). "own" is a shape of no published model.
MODELS = {
    "Llama-3.2-1B": ("dummy:Llama-3.2-1B", 2),
    "Qwen3-0.6B": ("dummy:Qwen3-0.6B", 3),
    "TinyLlama-1.1B": ("dummy:TinyLlama-1.1B-Chat-v1.0", 3),
    "own": (f"dummy:{Path(__file__).parent}/own_shape.json", 2),
}
SCHEMES = ("none", "int8wo", "int4wo-128", "fp6", "sparse-marlin", "uintx-2-64")
STEPS = [(rows, depth) for rows in (1, 4, 16) for depth in (0, 8192)]
PROMPTS = [(1, 128), (1, 1024), (4, 128), (16, 128), (4, 1024)]
LONG = (16, 1024)  # a prompt of ten seconds: of two schemes alone
LONG_SCHEMES = ("none", "int4wo-128")
LONG_MODELS = ("TinyLlama-1.1B",)
NEW = 8  # decoding steps that are timed at once
AT_LEAST = 0.25  # seconds of every case


def cases(scheme, model):
    """(kind, rows, positions): of a prompt its length, of a step the depth before it."""
    prompts = [*PROMPTS, *([LONG] if scheme in LONG_SCHEMES and model in LONG_MODELS else [])]
    return [("token", *step) for step in STEPS] + [("prompt", *prompt) for prompt in prompts]


def configs():
    from models.checkpoints.load import load_config

    return {
        name: dataclasses.replace(load_config(path).with_layers(layers), name=name)
        for name, (path, layers) in MODELS.items()
    }


# ---------------------------------------------------------------------------------- measuring


def measure(folder, minutes):
    """Go on with what is missing, for at most so many minutes."""
    ends = time.monotonic() + 60 * minutes
    folder.mkdir(parents=True, exist_ok=True)
    for scheme in ("every", *SCHEMES):
        path = folder / f"{scheme}.json"
        if path.exists():
            continue
        if time.monotonic() > ends:
            sys.exit("more to measure: call again")
        subprocess.run([sys.executable, __file__, "one", str(path), "--scheme", scheme], check=True)
        print(scheme, flush=True)
    print("complete")


def one(path, scheme):
    """What every scheme needs; or one scheme, calibrated and at once held against cases."""
    import torch

    from compare.commands.calibrate import make_generator
    from estimate import machine
    from typed_json import to_json

    settings = machine.Settings(torch.device("cpu"), torch.bfloat16, SCHEMES)
    if scheme == "every":
        base = machine.base(settings, make_generator)
        probe = machine.Probe(settings.device, settings.precision)
        common = machine.of_every_scheme(settings, probe)
        path.write_text(json.dumps(to_json(dataclasses.replace(common, base_bytes=base))))
        return
    probe = machine.Probe(settings.device, settings.precision)
    products, wholes = machine.of_scheme(scheme, settings, make_generator, probe)
    found = []
    for name, config in configs().items():
        if name == "own" and scheme not in LONG_SCHEMES:
            continue
        model, _ = machine.random_model(config, scheme, settings)
        for case in cases(scheme, name):
            found.append({"model": name, "scheme": scheme, **timed(model, case, probe)})
        del model
    held = {"products": products, "wholes": wholes, "cases": found}
    path.write_text(json.dumps(to_json(held)))


def timed(model, case, probe):
    """One case, with the machine's speed before and after it."""
    import torch

    from compare.commands.calibrate import make_generator

    kind, rows, positions = case
    size = positions + (NEW + 2 if kind == "token" else 1)
    generator = make_generator(model, rows, size, "dense")
    for cache in generator.caches:  # every byte is written: what is only allocated lies nowhere
        for buffer in cache.buffers():
            buffer.copy_(torch.randn(buffer.shape[-1]).to(buffer.dtype).expand_as(buffer))
    tokens = torch.randint(model.config.vocab_size, (rows, 1 if kind == "token" else positions))
    before = probe.speed(fresh=True)
    seconds = []
    if kind == "token":
        generator.generate(tokens, 3, positions)
        while len(seconds) < 3 or sum(seconds) * NEW < AT_LEAST:
            seconds.append(generator.generate(tokens, NEW + 1, positions).decode_seconds / NEW)
    else:
        seconds = [generator.generate(tokens, 1).prefill_seconds]
        if seconds[0] < 2:
            seconds = []  # the first one warms up
        while len(seconds) < 1 or (len(seconds) < 3 and sum(seconds) < 1):
            seconds.append(generator.generate(tokens, 1).prefill_seconds)
    after = probe.reading()
    return {
        "layers": model.config.num_layers,
        "kind": kind,
        "rows": rows,
        "positions": positions,
        "seconds": statistics.median(seconds),
        "samples": seconds,
        "speed": [before, after],
        "decoder": generator.decoder.name,
    }


# ---------------------------------------------------------------------------------- the report


def report(folder, json_path):
    from estimate.calibration import Speed
    from estimate.passes import CalibratedMachine

    calibration, measured = gathered(folder)
    machine, shapes = CalibratedMachine(calibration), configs()
    rows = []
    for case in measured:
        how = shapes[case["model"]], case["scheme"], "dense", case["rows"]
        if case["kind"] == "token":
            parts = machine.step(*how, case["positions"] + NEW // 2 + 1)
        else:
            parts = machine.prompt(*how, case["positions"])
        speeds = [Speed(**speed) for speed in case["speed"]]
        now = Speed(
            statistics.fmean(s.read for s in speeds), statistics.fmean(s.multiply for s in speeds)
        )
        read = machine.weight_bytes(*how[:2]) if case["kind"] == "token" else 0
        estimated = machine.at_speed(parts, now, read)
        rows.append(
            {
                **{key: value for key, value in case.items() if key != "seconds"},
                "measured_seconds": case["seconds"],
                "estimated_seconds": estimated,
                "estimated_at_calibration_speed": parts.seconds,
                "parts": parts.named,
                "error": estimated / case["seconds"] - 1,
                "error_at_calibration_speed": parts.seconds / case["seconds"] - 1,
            }
        )
    summary = {"cases": len(rows), **summed(rows, "all", lambda row: True)}
    for kind in ("token", "prompt"):
        summary |= summed(rows, kind, lambda row, k=kind: row["kind"] == k)
    for scheme in SCHEMES:
        summary |= summed(rows, scheme, lambda row, s=scheme: row["scheme"] == s)
    for name in MODELS:
        summary |= summed(rows, name, lambda row, n=name: row["model"] == n)
    for key, value in summary.items():
        print(key, value)
    for row in sorted(rows, key=lambda row: -abs(row["error"]))[:25]:
        print(
            f"{row['error']:+7.1%} ({row['error_at_calibration_speed']:+7.1%}) {row['kind']:7}"
            f"{row['model']:16}{row['scheme']:14} × {row['rows']:2} at {row['positions']}: "
            f"{1e3 * row['measured_seconds']:.2f} ms"
        )
    if json_path:
        head = {
            "command": "python tests/estimate/accuracy.py",
            "calibration": {"date": calibration.date, "device": calibration.device,
                            "versions": calibration.versions},
        }  # fmt: skip
        Path(json_path).write_text(json.dumps(head | {"summary": summary, "cases": rows}, indent=1))


def gathered(folder):
    """The calibration, put together from its parts, and the cases."""
    from estimate.calibration import Calibration
    from typed_json import from_json

    every = json.loads((folder / "every.json").read_text())
    cases = []
    for scheme in SCHEMES:
        if (path := folder / f"{scheme}.json").exists():
            part = json.loads(path.read_text())
            every["products"] += part["products"]
            every["wholes"] += part["wholes"]
            cases += part["cases"]
    return from_json(Calibration, every), cases


def summed(rows, name, takes):
    some = [row for row in rows if takes(row)]
    if not some:
        return {}
    return {
        name: {
            "cases": len(some),
            "mape": statistics.fmean(abs(row["error"]) for row in some),
            "worst": max(abs(row["error"]) for row in some),
            "mape_at_calibration_speed": statistics.fmean(
                abs(row["error_at_calibration_speed"]) for row in some
            ),
        }
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("measure", "one", "report"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--json")
    parser.add_argument("--scheme")
    given = parser.parse_args()
    if given.what == "measure":
        measure(given.path, given.minutes)
    elif given.what == "one":
        one(given.path, given.scheme)
    else:
        report(given.path, given.json)


if __name__ == "__main__":
    main()
