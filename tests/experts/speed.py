"""Tokens per second with experts in two tiers, way by way: python -m tests.experts.speed OPTIONS

    python -m tests.experts.speed --checkpoint_path tiny_moe --quantization int4wo-32 \\
        --expert_memory 22 --device cpu

Takes options of generate.py, --rounds (5, after one that does not count) and --steps (128 tokens).
One process loads the model once and decodes a real text, the embedded model's held-out one, token
by token, in several ways in turns, so that the machine's drift meets all: plain fetching (no cache,
and an expert at a time), fetching ahead, the cache, the cache with copies beside the computing,
with guesses as well as long as they are right, and always; and all experts in fast memory. In the
same minutes it reads experts from the slow tier at random, and says what the disk allows. Prints
medians over rounds, ratios round by round, and beside each the cost model's expectation.
"""

import argparse
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from quantbench.cli import quiet
from quantbench.experts.copies import THREADS
from quantbench.experts.placement import place
from quantbench.experts.rehearsal import decide_by_costs
from quantbench.experts.routing import identity
from quantbench.experts.slow import pages
from quantbench.experts.store import POLICIES, Guesses, Policy
from quantbench.experts.tiers import Tiers, tiers_of
from quantbench.experts.traffic import Traffic
from quantbench.generate import Generator
from quantbench.log.config import parse
from quantbench.models.formats import EMBEDDED
from quantbench.models.llama import Transformer
from quantbench.run import environment, loading
from quantbench.run.decoding import fused_step
from quantbench.run.plan import Plan, make_plan

PROMPT = 64  # tokens of the text that are read at once, before those that count
READS, BYTES = 400, 3e8  # of experts, for the disk's speed, at most

CACHE = POLICIES["cache"]
WAYS: dict[str, Policy] = {
    "fetch": POLICIES["fetch"],
    "fetch, ahead": replace(POLICIES["fetch"], ahead=True, guesses=Guesses.WHILE_RIGHT),
    "cache": CACHE,
    "cache, beside": replace(CACHE, ahead=True, guesses=Guesses.NEVER),
    "cache, ahead": replace(CACHE, ahead=True, guesses=Guesses.WHILE_RIGHT),
    "cache, always ahead": replace(CACHE, ahead=True),
}
ALL = "all in fast memory"


@dataclass(frozen=True)
class Pass:
    """One way in one round."""

    seconds: float  # of a decoding step
    traffic: Traffic  # of all steps


def main(words: list[str]) -> None:
    environment.prepare()
    quiet(False)
    own = argparse.ArgumentParser(allow_abbrev=False)
    own.add_argument("--rounds", type=int, default=5)
    own.add_argument("--steps", type=int, default=128)
    asked, words = own.parse_known_args(words)
    config = parse(words)
    plan = make_plan(replace(config, max_new_tokens=1, expert_policy="cache"))
    model = loading.load(plan, lambda done, total: None, print).model
    tiers = tiers_of(model)
    assert tiers is not None
    slots = sum(tiers.quotas) + tiers.arrivals
    generator = Generator(model, 1, PROMPT + asked.steps + 1)
    tokens = torch.tensor([plan.tokenizer.encode(text())[: PROMPT + asked.steps]])
    rounds = []
    with torch.no_grad():
        for number in range(asked.rounds + 1):
            disk = [megabytes_per_second(tiers, threads) for threads in (1, THREADS)]
            taken = {way: decode(generator, tokens, tiers, way, slots) for way in (*WAYS, ALL)}
            if number:
                rounds.append((disk, taken))
    show(plan, tiers, slots, rounds, asked.steps)


def text() -> str:
    return (EMBEDDED / "heldout.txt").read_text()


def decode(generator: Generator, tokens: torch.Tensor, tiers: Tiers, way: str, slots: int) -> Pass:
    """Read the text's prompt, and then its other tokens one by one: these count."""
    hold(tiers, generator.model, way, slots)
    decide_by_costs(tiers, generator.model, fused_step(generator.decoder))
    generator.forward(tokens[:, :PROMPT], 0)
    before, started = tiers.counted(), time.perf_counter()
    for position in range(PROMPT, tokens.shape[1]):
        generator.forward(tokens[:, position : position + 1], position)
    seconds = time.perf_counter() - started
    steps = tokens.shape[1] - PROMPT
    return Pass(seconds / steps, tiers.counted().since(before))


def hold(tiers: Tiers, model: Transformer, way: str, slots: int) -> None:
    every = len(tiers.keys)
    tiers.policy = WAYS.get(way, CACHE)
    slots = every if way == ALL else slots
    capacity = every if slots >= every else slots - tiers.least
    tiers.hold(place("uniform", identity(model), capacity).fast, slots)


def megabytes_per_second(tiers: Tiers, threads: int) -> float:
    """At which so many threads read experts, in random order."""
    reads = min(READS, int(BYTES / tiers.layout.nbytes))
    keys = random.choices(tiers.keys, k=reads)
    buffers = [pages(tiers.layout.nbytes) for _ in range(threads)]

    def read(first: int) -> None:
        for key in keys[first::threads]:
            tiers.slow.read(key, buffers[first])

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    return reads * tiers.layout.nbytes / 1e6 / (time.perf_counter() - started)


Round = tuple[list[float], dict[str, Pass]]


def show(plan: Plan, tiers: Tiers, slots: int, rounds: list[Round], steps: int) -> None:
    nbytes = tiers.layout.nbytes
    print(
        f"{plan.name} as {plan.spec}: {len(tiers.keys)} experts of {nbytes / 1e3:.0f} kB on "
        f"{tiers.slow.name} ({tiers.slow.place}), {slots} in fast memory, {len(rounds)} rounds "
        f"of {steps} tokens"
    )
    for index, threads in enumerate((1, THREADS)):
        speeds = [disk[index] for disk, _ in rounds]
        each = nbytes / 1e6 / statistics.median(speeds) * threads
        print(
            f"disk, {threads} thread(s): {spread(speeds, 0)} MB/s, an expert in {1e3 * each:.3f} ms"
        )
    for way in (*WAYS, ALL):
        passes = [taken[way] for _, taken in rounds]
        errors = [expected(taken, way, steps) / taken[way].seconds - 1 for _, taken in rounds]
        speeds = [1 / one.seconds for one in passes]
        last = passes[-1].traffic
        waiting = statistics.median(one.traffic.waiting_seconds / steps for one in passes)
        print(
            f"{way}: {spread(speeds, 1)} tokens/s, {1e3 * waiting:.3f} ms of a step waiting; "
            f"expected seconds are off by {spread([100 * e for e in errors], 0)} %; "
            f"{last.sentence()}"
        )
    for way in list(WAYS)[1:]:
        ratios = [taken["fetch"].seconds / taken[way].seconds for _, taken in rounds]
        print(f"{way} ÷ fetch: {spread(ratios, 2)}")


def expected(taken: dict[str, Pass], way: str, steps: int) -> float:
    """Seconds of a step by the cost model: its experts', and the rest as it is without tiers."""
    whole = taken[ALL]
    rest = whole.seconds - whole.traffic.expert_seconds / steps
    traffic = taken[way].traffic
    return rest + (traffic.expected_seconds + traffic.expected_after_seconds) / steps


def spread(values: list[float], digits: int) -> str:
    """The median, and the least and greatest."""
    shown = [f"{x:.{digits}f}" for x in (statistics.median(values), min(values), max(values))]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


if __name__ == "__main__":
    main(sys.argv[1:])
