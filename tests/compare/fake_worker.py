"""A worker without a model: it answers at once, as its arguments say. For tests of what asks it.

fake_worker.py [--seconds X] [--noise X] [--no-memory-beside] [--die-at N] [--journal FILE]
"""

import argparse
import dataclasses
import json
import os
import random
import signal
import sys

from quantbench.bench.answers import LogitsFile, Quality, QualityAnswer
from quantbench.log.options import parse
from quantbench.typed_json import to_json
from tests.bench.facts import arm_facts

options = argparse.ArgumentParser()
options.add_argument("--seconds", type=float, default=1.0)
options.add_argument("--noise", type=float, default=0.001)
options.add_argument("--no-memory-beside", action="store_true")
options.add_argument("--die-at", type=int)
options.add_argument("--journal")
options.add_argument("--quality-fails")
options.add_argument("--readings", default="1e9", help="bytes/s in turn; - fails, x dies")
given = options.parse_args()
random_number = random.Random(os.getpid())


def load(argv, saved=None, headroom=0, others=0):
    global config
    config = parse(argv)
    if given.no_memory_beside and headroom:
        return None
    return {"device": "cpu", "dummy": False}


def quality(tokens, text, reference, keep):
    scores = Quality(tokens, 8.0, 0.1)
    if reference:
        scores = dataclasses.replace(scores, kl=0.5, kl_standard_error=0.01, top1=0.75, top5=0.5)
    return QualityAnswer(scores, LogitsFile(keep, 1, 1, "bfloat16") if keep else None)


def get_ready():
    own = dataclasses.replace(config, device="cpu")
    return arm_facts(config=own, scheme=config.quantization, kernel="torch")


def sample(index):
    if given.die_at is not None and index >= given.die_at:
        os.kill(os.getpid(), signal.SIGKILL)
    scale = given.seconds * random_number.lognormvariate(0, given.noise)
    new = config.max_new_tokens
    return {
        "prefill_seconds": scale,
        "decode_seconds": scale * (new - 1),
        "tok_s": 1 / scale,
        "prefill_tok_s": 1 / scale,
        "decode_tok_s": 1 / scale,
        "token_seconds": [scale] * (new - 1),
        "peak_memory_bytes": {"resident": 3},
    }


def expected(run):
    return {"figures": None}


readings = given.readings.split(",")


def bandwidth(device):
    reading = readings.pop(0) if len(readings) > 1 else readings[0]
    if reading == "x":
        os.kill(os.getpid(), signal.SIGKILL)
    if reading == "-":
        return None
    caveat = "it is slow" if reading.endswith("s") else None
    return {"bytes_per_s": float(reading.rstrip("s")), "probe": "fake", "caveat": caveat}


for line in sys.stdin:
    request = json.loads(line)
    what = request.pop("do")
    if given.journal:
        with open(given.journal, "a") as journal:
            journal.write(f"{os.getpid()} {what}\n")
    did = globals()[what](**request)
    answer = {"did": to_json(did)}
    if did is None:
        answer = {"failed": "out of memory", "kind": "memory"}
    print(json.dumps(answer), flush=True)
