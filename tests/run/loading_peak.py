"""By how much loading a quantized model raises the resident set, at its highest; bytes, as JSON.

    python -m tests.run.loading_peak dummy:small.json dummy:model.json layer_by_layer:fp6 …
    python -m tests.run.loading_peak small large two_tiers:none     # saved mixtures of experts

A line for each way and scheme. Each is loaded by a process of its own, forked when torch is
imported and nothing was computed yet: what earlier loads left in malloc's arenas would count, or
hide a rise. There the small model is loaded first, for whatever is imported or allocated once.
"""

import ctypes
import gc
import json
import multiprocessing
import os
import re
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

from quantbench.devices import stored_bytes
from quantbench.log.config import RunConfig
from quantbench.models.loading import load_model
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse
from quantbench.run import loading
from quantbench.run.plan import make_plan


def layer_by_layer(path, quantizer):
    return load_model(path, precision=torch.bfloat16, transform=quantizer)


def everything_first(path, quantizer):
    """What loading must not do."""
    model = load_model(path, precision=torch.bfloat16)
    for name in [name for name, module in model.named_modules() if type(module) is nn.Linear]:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, quantizer(name, model.get_submodule(name)))
    return model


def two_tiers(path, _):
    """A saved mixture, of whose experts four are in fast memory."""
    how = {"checkpoint_path": path, "expert_memory": "4", "expert_policy": "fetch"}
    plan = make_plan(RunConfig(device="cpu", **how))
    return loading.load(plan, lambda done, total: None, lambda line: None).model


WAYS = {way.__name__: way for way in (layer_by_layer, everything_first, two_tiers)}


def peak_of(work):
    """What work() returns, and by how much the resident set rose in it, at its highest."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or tensors would get memory that was resident before
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # from now on the peak is counted anew
    result = work()
    return result, status("VmHWM") - before


def status(name):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{name}:\s*(\d+) kB$", text, re.M)[1])


@torch.no_grad()
def measure(small, path, job):
    way, _, scheme = job.partition(":")

    def load(model):
        return WAYS[way](model, Quantizer(parse(scheme), torch.device("cpu"), torch.bfloat16))

    load(small)
    model, peak = peak_of(lambda: load(path))
    quantized = sum(map(stored_bytes, model.parameters()))
    return {"job": job, "peak": peak, "quantized": quantized}


def main(small, path, *jobs):
    cores = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("fork").Pool(cores, maxtasksperchild=1) as pool:
        for answer in pool.imap(partial(measure, small, path), jobs):
            print(json.dumps(answer))


if __name__ == "__main__":
    torch.set_num_threads(1)  # each thread has its temporaries
    main(*sys.argv[1:])
