"""The shares of estimate/efficiency.py, fitted to the recorded cases of two CPUs, and their errors.

    python -m tests.estimate.fit_efficiency     # prints the table, and renews both files' estimates

A case is a step or a prompt of Llama-3.2-1B, Qwen3-0.6B, TinyLlama or a shape of no published model
with 2 or 3 layers, with the speeds of memory and of a bfloat16 product that were read beside each
sample. Its estimated_seconds are by shares that were fitted to the other machine alone, so that no
case is in its own fit. "count" has what the estimator counts in its pass: bytes and operations.
"""

import json
import math
import statistics
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

DATA = Path(__file__).parents[2] / "docs" / "data"
FILES = (DATA / "estimate_accuracy.json", DATA / "estimate_accuracy_amx.json")


def terms(case):
    """Seconds of a case at the whole bandwidth, and at the whole speed of a product."""
    read, multiply = (
        statistics.geometric_mean(sample[name] for sample in case["samples"])
        for name in ("read", "multiply")
    )
    return case["count"]["bytes"] / read, case["count"]["flops"] / multiply


def fitted(cases):
    """Shares (of the bandwidth, of a product's speed) that fit these cases best."""
    columns = np.array([terms(case) for case in cases])
    measured = np.array([case["measured_seconds"] for case in cases])

    def errors(logs):
        return np.log((columns / np.exp(logs)).sum(1) / measured)

    return np.exp(least_squares(errors, [-0.2, -0.3], loss="soft_l1", f_scale=0.1).x)


def by_scheme(cases):
    schemes = dict.fromkeys(case["scheme"] for case in cases)
    return {s: fitted([case for case in cases if case["scheme"] == s]) for s in schemes}


def estimated(case, shares):
    memory, arithmetic = shares[case["scheme"]]
    bytes_alone, operations_alone = terms(case)
    return bytes_alone / memory + operations_alone / arithmetic


def deviation(cases):
    """Root mean square of log(estimated ÷ measured)."""
    logs = [math.log(case["estimated_seconds"] / case["measured_seconds"]) for case in cases]
    return math.sqrt(statistics.fmean(log * log for log in logs))


def main():
    contents = [json.loads(path.read_text()) for path in FILES]
    every = [content["cases"] for content in contents]
    for name, (memory, arithmetic) in by_scheme(sum(every, [])).items():
        print(f'    "{name}": ({memory:.2f}, {arithmetic:.2f}),')
    for path, content, others in zip(FILES, contents, reversed(every), strict=True):
        shares = by_scheme(others)
        for case in content["cases"]:
            case["estimated_seconds"] = estimated(case, shares)
        for kind in ("token", "prompt"):
            cases = [case for case in content["cases"] if case["kind"] == kind]
            print(path.name, kind, f"{deviation(cases):.3f}")
        path.write_text(json.dumps(content, indent=0) + "\n")


if __name__ == "__main__":
    main()
