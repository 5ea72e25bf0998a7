"""A peer without a model: it speaks as compare/peers/worker.py does, and answers at once.

fake_peer.py [--step SECONDS] [--prompt SECONDS] [--fails-to-load]
"""

import argparse
import json
import sys

from quantbench.typed_json import to_json
from tests.bench.facts import peer_facts

options = argparse.ArgumentParser()
options.add_argument("--step", type=float, default=0.1)
options.add_argument("--prompt", type=float, default=1.0)
options.add_argument("--fails-to-load", action="store_true")
given = options.parse_args()


def load(argv, saved=None, headroom=0, others=0):
    return None if given.fails_to_load else {"device": "cpu", "dummy": False}


def get_ready():
    return peer_facts(weight_bytes=5_000_000)


def sample(index):
    return {
        "prefill_seconds": given.prompt,
        "decode_seconds": 4 * given.step,
        "tok_s": 1 / given.step,
        "prefill_tok_s": 1.0,
        "decode_tok_s": 1 / given.step,
        "token_seconds": [given.step] * 4,
    }


for line in sys.stdin:
    request = json.loads(line)
    did = globals()[request.pop("do")](**request)
    failed = {"failed": "out of memory", "kind": "other"}
    print(json.dumps({"did": to_json(did)} if did is not None else failed), flush=True)
