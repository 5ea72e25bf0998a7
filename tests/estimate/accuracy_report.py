"""The errors of what tests/estimate/accuracy.py measured, as a table and as JSON.

The JSON holds the calibration as `quantbench calibrate` writes one, numbers to DIGITS digits, and
every sample of every case: each estimate and each error can be computed anew from it. `report` does
so when it is given the file in the place of the folder.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from quantbench.devices import prefill_chunk
from quantbench.estimate.calibration import Calibration, LeftBehind, Speed, WholePoint
from quantbench.estimate.counting import count_model
from quantbench.estimate.passes import CalibratedMachine
from quantbench.log.about import about
from quantbench.models.config import ModelConfig
from quantbench.typed_json import from_json, to_json

WORST = 25  # cases that are printed
DIGITS = 6  # of the calibration's numbers
Row = dict[str, Any]


def report(
    where: Path, json_path: str | None, configs: dict[str, ModelConfig], schemes: Sequence[str]
) -> None:
    """Print the errors of a folder of measurements, and write them to json_path.

    where: the folder, or the JSON of an earlier report.
    """
    calibration, samples = reported(where) if where.is_file() else gathered(where, schemes)
    rows = errors(calibration, samples, configs)
    runs = where if where.is_file() else where / "memory.json"
    memory = memory_errors(runs, configs, calibration.name)
    calibration = dataclasses.replace(calibration, **_beside_the_model(memory))
    groups: dict[str, Callable[[Row], bool]] = {"all": lambda row: True}
    for key, values in (
        ("kind", ("token", "prompt")),
        ("scheme", schemes),
        ("model", list(configs)),
        ("batch", (1, 4, 16)),
    ):
        for value in values:
            groups[f"{key} {value}"] = lambda row, k=key, v=value: row[k] == v
    summary = [
        {"group": name, **summed(some)}
        for name, takes in groups.items()
        if (some := [row for row in rows if takes(row)])
    ]
    for line in summary:
        print(
            f"{line['group']:22} {line['cases']:4} cases: mean {line['mape']:6.1%}, "
            f"worst {line['worst']:6.1%}, median {line['median']:+6.1%}, without the readings "
            f"{line['mape_without_readings']:.1%}"
        )
    for row in sorted(rows, key=lambda row: -abs(row["error"]))[:WORST]:
        print(
            f"{row['error']:+7.1%} ({row['error_without_readings']:+7.1%}) {row['kind']:7}"
            f"{row['model']:16}{row['scheme']:14} × {row['batch']:2} at {row['positions']}: "
            f"{1e3 * row['measured_seconds']:.2f} ms"
        )
    for row in memory:
        print(
            f"memory {row['error']:+6.1%} {row['model']:16}{row['scheme']:14} × {row['batch']:2} "
            f"at {row['prompt']}: {row['measured_bytes'] / 1e6:.0f} MB"
        )
    head = {
        "about": {**dataclasses.asdict(about()), **_measured_on(where)},
        "calibration": {**to_json(calibration), "speed": to_json(calibration.speed)},
        "summary": summary,
        "memory_summary": {"cases": len(memory), **_sizes([r["error"] for r in memory])},
    }  # fmt: skip
    print(head["memory_summary"])
    if json_path:
        value = {**head, "cases": rows, "memory": memory}
        Path(json_path).write_text(lines(value) + "\n")


def _measured_on(where: Path) -> dict[str, Any]:
    """Of an earlier report: its machine and versions, which are not those that report it again."""
    if not where.is_file():
        return {}
    before = json.loads(where.read_text())["about"]
    return {key: before[key] for key in ("machine", "versions")}


def renew_memory(folder: Path, json_path: str, configs: dict[str, ModelConfig]) -> None:
    """Put the folder's runs of `accuracy memory` into the file, in the place of those it has."""
    value = json.loads(Path(json_path).read_text())
    device = value["calibration"]["device"]["name"]
    rows = memory_errors(folder / "memory.json", configs, device)
    value["memory"], value["memory_about"] = rows, dataclasses.asdict(about())
    value["calibration"] |= to_json(_beside_the_model(rows))
    value["memory_summary"] = {"cases": len(rows), **_sizes([row["error"] for row in rows])}
    print(value["memory_summary"])
    Path(json_path).write_text(lines(value) + "\n")


def lines(value: Any, levels: int = 3) -> str:
    """JSON in which what lies this deep takes a line: a point of the calibration, a case's key."""
    if not levels or not value or not isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, list):
        return "[\n" + ",\n".join(lines(item, levels - 1) for item in value) + "\n]"
    items = (f"{json.dumps(key)}: {lines(item, levels - 1)}" for key, item in value.items())
    return "{\n" + ",\n".join(items) + "\n}"


def gathered(folder: Path, schemes: Sequence[str]) -> tuple[Calibration, list[WholePoint]]:
    """The calibration, put together from its parts, and the samples of cases."""
    every = json.loads((folder / "every.json").read_text())
    seconds, samples = every.pop("calibrating_seconds"), []
    for scheme in schemes:
        if (path := folder / f"{scheme}.json").exists():
            part = json.loads(path.read_text())
            for key in ("products", "attention", "weight_stacks", "cache_stacks", "wholes"):
                every[key] += part[key]
            samples += part["cases"]
            seconds += part["calibrating_seconds"]
    cases = [from_json(WholePoint, sample) for sample in samples]
    return from_json(Calibration, {**_rounded(every), "seconds": seconds}), cases


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def reported(path: Path) -> tuple[Calibration, list[WholePoint]]:
    """The calibration and the samples of cases that a report's JSON holds."""
    value = json.loads(path.read_text())
    if "products" not in value["calibration"]:
        raise click.UsageError(
            f"{path}: the calibration's points are not in it; report its FOLDER again"
        )
    cases = [
        WholePoint(
            row["scheme"], row["model"], "dense", row["decoder"], row["batch"],
            *((1, row["positions"]) if row["kind"] == "token" else (row["positions"], 0)),
            sample["seconds"], Speed(sample["read"], sample["multiply"]),
        )
        for row in value["cases"]
        for sample in row["samples"]
    ]  # fmt: skip
    return from_json(Calibration, value["calibration"]), cases


def errors(
    calibration: Calibration, samples: Sequence[WholePoint], configs: dict[str, ModelConfig]
) -> list[Row]:
    """A row for each case. Each sample has an estimate, at the speed that was read beside it; the
    error of the case is the median of theirs."""
    machine = CalibratedMachine(calibration)
    cases: dict[tuple[Any, ...], list[WholePoint]] = {}
    for s in samples:
        cases.setdefault((s.model, s.scheme, s.tokens, s.rows, s.depth), []).append(s)
    rows = []
    for (name, scheme, tokens, batch, depth), each_sample in cases.items():
        config, step = configs[name], tokens == 1
        some = [s for s in each_sample if calibration.undisturbed(s.speed)] or each_sample
        if step:
            parts = machine.step(config, scheme, "dense", batch, depth)
        else:
            parts = machine.prompt(config, scheme, "dense", batch, tokens)
        in_a_pass = batch * min(tokens, prefill_chunk(machine.device, batch))
        each = [machine.at_speed(parts, s.speed, scheme, in_a_pass, step).seconds for s in some]
        error = statistics.median(e / s.seconds for e, s in zip(each, some, strict=True)) - 1
        measured = statistics.median(s.seconds for s in some)
        rows.append(
            {
                "model": name,
                "device": calibration.name,
                "scheme": scheme,
                "layers": config.num_layers,
                "kind": "token" if step else "prompt",
                "batch": batch,
                "positions": depth if step else tokens,
                "decoder": some[0].decoder,
                "measured_seconds": measured,
                "estimated_seconds": statistics.median(each),
                "error": error,
                "error_without_readings": parts.seconds / measured - 1,
                "parts": parts.named,
                "samples": [
                    {"seconds": s.seconds, "read": s.speed.read, "multiply": s.speed.multiply}
                    for s in some
                ],
            }
        )
    return rows


def summed(rows: Sequence[Row]) -> Row:
    without = [abs(row["error_without_readings"]) for row in rows]
    return {
        "cases": len(rows),
        **_sizes([row["error"] for row in rows]),
        "mape_without_readings": statistics.fmean(without),
    }


def _sizes(values: Sequence[float]) -> Row:
    """Errors: the mean of their sizes, the largest, and the median with its sign."""
    if not values:
        return {}
    sizes = [abs(value) for value in values]
    return {
        "mape": statistics.fmean(sizes),
        "worst": max(sizes),
        "median": statistics.median(values),
    }


def memory_errors(path: Path, configs: dict[str, ModelConfig], device: str) -> list[Row]:
    """A row for each run of `accuracy memory`, or of a report: its peak beside the estimate."""
    if not path.exists():
        return []
    rows = []
    for run, process, left, measured in _memory_runs(json.loads(path.read_text())):
        config = configs[run["model"]]
        chunk = prefill_chunk(torch.device("cpu"), run["batch"])
        count = count_model(
            config, run["scheme"], batch=run["batch"], tokens=run["prompt"], chunk=chunk,
            cache_size=run["cache_size"],
        )  # fmt: skip
        parts = {
            "process": process,
            "weights": count.weight_bytes,
            "kv_cache": count.kv_cache_bytes,
            "activations": count.peak_activation_bytes,
        }
        passes = math.ceil(run["prompt"] / chunk)
        parts["left_behind"] = left.bytes(count.peak_activation_bytes, passes)
        estimated = sum(parts.values())
        rows.append(
            {**run, "device": device, "kind": "memory", "measured_bytes": measured,
             "estimated_bytes": estimated, "error": estimated / measured - 1, "parts": parts,
             "left_behind": dataclasses.asdict(left)}
        )  # fmt: skip
    return rows


def _beside_the_model(rows: Sequence[Row]) -> dict[str, Any]:
    """What the calibration says of memory besides the model, which `measure` does not measure."""
    if not rows:
        return {}
    first = rows[0]
    left = LeftBehind(**first["left_behind"])
    return {"base_bytes": round(first["parts"]["process"]), "left_behind": left}


def _memory_runs(found: Row) -> list[tuple[Row, float, LeftBehind, float]]:
    """(run, bytes of a process without a model, what prompts leave behind, bytes at its peak), from
    what `accuracy memory` or a report wrote."""
    if "memory" in found:
        return [
            (row, row["parts"]["process"], LeftBehind(**row.get("left_behind", {})),
             row["measured_bytes"])
            for row in found["memory"]
        ]  # fmt: skip
    left = LeftBehind(**found.get("left_behind", {}))
    return [
        ({key: run[key] for key in run if key != "peak_bytes"}, found["base_bytes"], left,
         run["peak_bytes"])
        for run in found["runs"]
    ]  # fmt: skip
