"""What `recommend` measures: every scheme that runs here and may satisfy --max_memory.

names, needs = menu(common, limits)         # the baseline first; the bytes of each
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantbench.compare.limits import Limits
from quantbench.errors import KernelError, UsageError
from quantbench.log.config import RunConfig
from quantbench.progress import say
from quantbench.quantize.spec import MEASURED, SHOWN, START_WITH, parse, parse_scheme
from quantbench.run import checks
from quantbench.text import size

AS_IS = "as-is"  # loads fastest of all: nothing is quantized
BASELINES = ("none", "int8wo")  # the first that fits into this machine's memory


@dataclass(frozen=True)
class Need:
    """Bytes of a scheme, from shapes alone."""

    scheme: str
    held: int  # weights, embedding and KV cache
    step: int  # weights that a decoding step reads


def menu(
    common: RunConfig, asked: Limits, given: Sequence[str] | None = None
) -> tuple[list[str], dict[str, Need]]:
    """The schemes to measure, and the bytes of each. given: these and none; if None, every
    scheme. autoquant is not among them: what it chooses from is. Raises UsageError where
    --max_memory is below all of them."""
    if given is None:
        from quantbench.run import runnable  # imports torch

        names = runnable.schemes(common)
    else:
        specs = [parse(name, "--schemes") for name in given]
        if selection := next((spec for spec in specs if spec.scheme is None), None):
            raise UsageError(f"--schemes {selection}: name what it chooses from")
        names = list(dict.fromkeys([BASELINES[0], *map(str, specs)]))
    needs, free = needed(common, [name for name in names if name not in MEASURED])
    held = {name: need.held for name, need in needs.items()}
    return select(held, free, asked.max_memory), needs


def select(needs: Mapping[str, int], free: int | None, most: int | None) -> list[str]:
    """The baseline, and all schemes that fit into memory; says which are left out.

    needs: bytes of weights and KV cache by scheme. most: the bytes that --max_memory allows, None
    for any. free: bytes free on this machine, None if not known. Raises UsageError where none fits.
    """
    smallest = min(needs, key=lambda name: needs[name])
    if most is not None and needs[smallest] > most:
        raise UsageError(
            f"--max_memory {size(most)}: the smallest scheme for this model, {smallest}, needs "
            f"{size(needs[smallest])} for weights and KV cache; allow more, or take a smaller model"
        )
    fitting = [name for name, count in needs.items() if free is None or count <= free]
    baseline = next((name for name in BASELINES if name in fitting), smallest)
    if baseline != BASELINES[0]:
        say(f"The baseline is {baseline}, as {BASELINES[0]} does not fit into {size(free or 0)}")
    others = [name for name in fitting if name != baseline]
    # One scheme of each number of bits, then one of each other size, largest first: time may end
    # before all are judged, and a variant is not tried where the quality of a finer variant is far
    # from the limit. What is calibrated comes last: it may take longer to load than all others.
    first = (AS_IS, *START_WITH)
    later = {name for name in others if name not in first}
    slow = {name for name in later if parse(name).calibrated}
    others.sort(key=lambda n: (n in later, n in slow, -needs[n]))
    sizes = [needs[name] for name in others]
    again = {name for place, name in enumerate(others) if needs[name] in sizes[:place]}
    others.sort(key=lambda n: (n in later, n in slow, n in later & again))
    left_out = [name for name in others if most is not None and needs[name] > most]
    if left_out:
        named = ", ".join(f"{name} ({size(needs[name])})" for name in left_out)
        say(f"Not measured, as weights and KV cache exceed --max_memory {size(most or 0)}: {named}")
    chosen = [baseline, *(name for name in others if name not in left_out)]
    if len(chosen) < 2:
        raise UsageError(
            f"only {baseline} is left to measure: allow more --max_memory, or take a smaller model"
        )
    return chosen


def needed(common: RunConfig, schemes: Sequence[str]) -> tuple[dict[str, Need], int | None]:
    """The bytes of each scheme, as --dry_run counts them, and those that are free. A scheme
    that cannot take the model's shapes is left out."""
    from quantbench import devices
    from quantbench.models.formats import open_checkpoint
    from quantbench.run.plan import make_plan
    from quantbench.run.sizes import kv_cache_bytes, size_of

    checkpoint = open_checkpoint(common.checkpoint_path)
    saved = checkpoint.saved
    if saved and checkpoint.in_full_precision() is None:
        raise UsageError(
            f"--checkpoint_path {common.checkpoint_path} was saved as {saved.scheme}: schemes are "
            "compared on the full-precision checkpoint; give that one"
        )
    plan = make_plan(dataclasses.replace(common, quantization="none"))
    needs = {}
    for name in (*schemes, *([AS_IS] if saved else [])):
        try:
            if name in SHOWN:
                own = dataclasses.replace(plan, spec=parse_scheme(name))
            else:  # a scheme per layer: the file's, or a recipe's
                own = make_plan(dataclasses.replace(common, quantization=name))
            assert own.spec.scheme
            how = own.device, own.precision, common.kernel
            weights = size_of(own.architecture, own.spec.scheme, *how)
        except KernelError:
            continue
        cached = kv_cache_bytes(
            own.architecture, common.batch_size, own.cache_size, own.precision, own.cache
        )
        needs[name] = Need(name, weights.memory_bytes + cached, weights.model_bytes)
    return needs, devices.free_memory(plan.device)


def check_models(checkpoints: Sequence[str]) -> None:
    """Raise UsageError for models that bits per byte cannot compare."""
    if len(checkpoints) < 2:
        return
    for path in checkpoints:
        checks.refuse_random_weights(path, "several models")
    names = [name_of(path) for path in checkpoints]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"two --checkpoint_path end in {min(twice)}: give models of other names")


def name_of(checkpoint_path: str) -> str:
    """The name of the model's folder inside --output, where there are several models."""
    return Path(checkpoint_path).absolute().name
