"""From --expert_memory to experts in two tiers: the slow one is a disk, or RAM under a card.

tiers = open_tiers(plan, quantizer, say)    # before weights are read
model = load_model(…, transform=tiers.after(quantizer))
settle(plan, tiers, model, say)             # some experts are in fast memory now
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from quantbench import devices, files
from quantbench.errors import UsageError
from quantbench.experts.layout import ExpertLayout
from quantbench.experts.placement import PLACEMENTS, Fast, from_file, place
from quantbench.experts.popularity import Routers, find
from quantbench.experts.routing import identity, routers_of
from quantbench.experts.slow import (
    File,
    Key,
    Ram,
    SlowTier,
    Unusable,
    new_file,
    pages,
    saved_file,
)
from quantbench.experts.tiers import POLICIES, Policy, Tiers, keys_of
from quantbench.log.config import RunConfig
from quantbench.models import build
from quantbench.models.formats.base import Tensors
from quantbench.models.formats.saved import SavedModel
from quantbench.models.llama import Transformer
from quantbench.models.loading import Stages, read_packed
from quantbench.models.mixtral import MixtureOfExperts
from quantbench.progress import Say
from quantbench.quantize.registry import Quantizer, quantizer_of
from quantbench.run import decoding
from quantbench.run.plan import Plan
from quantbench.run.sizes import expert_slots, kv_cache_bytes, size_of
from quantbench.text import counted, size

RESERVE = 0.1  # share of the free memory that --expert_memory auto leaves free
CPU = torch.device("cpu")
# The policy `auto` is the faster of these two, by the median of STEPS steps of each, after one
# of each that does not count.
CANDIDATES = (POLICIES["cache"], POLICIES["compute_there"])
STEPS = 12
POSITIONS = len(CANDIDATES) * (1 + STEPS)  # of all steps


def check(plan: Plan) -> None:
    """Raise UsageError for options about experts that cannot be followed, as far as that is known
    before weights are read: too little memory, counts of another model."""
    config, device = plan.config, plan.device
    routers = routers_of(plan.architecture)  # refuses a model without experts
    if config.expert_folder and device.type != "cpu":
        raise UsageError(
            f"--expert_folder: with --device {device} experts are in RAM, not on a disk: leave it "
            "out"
        )
    if plan.spec.scheme and config.expert_memory != "auto":
        settings = plan.spec.scheme, device, plan.precision, config.kernel
        nbytes = size_of(plan.architecture, *settings).expert_bytes
        require_enough(plan, expert_slots(config, nbytes, 0), nbytes)
    if config.expert_placement not in PLACEMENTS:
        placed(config, routers, sum(routers.experts))


def open_tiers(plan: Plan, quantizer: Quantizer | None, say: Say) -> Tiers:
    """Tiers for the run's model. They are empty, unless --save has left the experts beside the
    checkpoint.

    quantizer: the run's; None where it is not known before weights are read.
    Raises UsageError for a policy that cannot be followed, TierError for a slow tier that cannot be
    written.
    """
    config, device = plan.config, plan.device
    rest = plan.architecture, device, policy_of(config), _beneath(plan)
    if device.type != "cpu":
        return Tiers(Ram(pinned=True), *rest)
    if plan.checkpoint.saved is not None and not (config.expert_folder or config.save):
        try:
            slow, linears = open_saved(plan, quantizer)
            tiers = Tiers(slow, *rest)
            tiers.are_stored(linears)
            return tiers
        except Unusable as reason:
            say(
                f"{reason}: experts are written into {_folder(config)} until the run ends; "
                "generate.py --save with --expert_memory writes them once"
            )
    if config.save and not config.expert_folder:
        return Tiers(new_file(Path(config.save), kept=True), *rest)
    return Tiers(new_file(_folder(config)), *rest)


@torch.no_grad()
def open_saved(plan: Plan, quantizer: Quantizer | None) -> tuple[File, dict[str, nn.Module]]:
    """The experts that --save has left beside the plan's checkpoint, and one's linear layers by
    their names in it.

    The file holds experts in the form of one kernel. So the first and the last expert are quantized
    and packed as this run does it, from the shards of the same folder, and compared with its bytes.
    quantizer: the run's; it notes its kernels for all of these experts, which it will not see.
    Raises Unusable, CheckpointError, KernelError.
    """
    checkpoint = plan.checkpoint
    if not isinstance(checkpoint, SavedModel) or not checkpoint.has_experts or quantizer is None:
        raise Unusable(f"{plan.config.checkpoint_path} holds no file of them")
    every, keys = keys_of(checkpoint.config()), keys_of(plan.architecture)
    weights, compared = checkpoint.tensors(), dict.fromkeys((keys[0], keys[-1]))
    experts = {key: _packed(plan, quantizer, weights, key) for key in compared}
    layout = ExpertLayout.of(experts[keys[0]])
    packed, stored = pages(layout.nbytes), pages(layout.nbytes)
    try:
        slow = saved_file(checkpoint.file.parent, every, layout.nbytes)
        for key, linears in experts.items():
            layout.write(linears, packed)
            slow.read(key, stored)
            if not torch.equal(packed, stored):
                raise Unusable(f"{slow.where} has another form than this run's kernels read")
    except Unusable:
        quantizer.ran.clear()
        raise
    for kernel in quantizer.ran:
        quantizer.ran[kernel] *= len(keys) // len(compared)
    return slow, experts[keys[0]]


def _packed(plan: Plan, quantizer: Quantizer, weights: Tensors, key: Key) -> dict[str, nn.Module]:
    """An expert's linear layers as this run's kernels hold them, read from the shards."""
    with torch.device("meta"):
        model = build(plan.architecture.one_of_each_kind()).to(plan.precision)
    mixture = next(module for module in model.modules() if isinstance(module, MixtureOfExperts))
    name = f"layers.{key[0]}.feed_forward.experts.{key[1]}"
    linears = {}
    for part, module in mixture.experts[0].named_children():
        layer = quantizer.quantized(f"{name}.{part}", module)
        read_packed(weights, f"{name}.{part}", layer)
        linears[part] = quantizer.built(f"{name}.{part}", layer)
    return linears


def _folder(config: RunConfig) -> Path:
    return Path(config.expert_folder or files.cache_folder() / "experts")


def _beneath(plan: Plan) -> tuple[SlowTier, Stages] | None:
    """What computes in RAM beneath a card: the CPU, by its own kernels."""
    if plan.device.type == "cpu" or plan.config.expert_policy not in ("auto", "compute_there"):
        return None
    if plan.spec.scheme is None:
        raise UsageError(
            f"--expert_policy {plan.config.expert_policy}: {plan.spec} chooses kernels for the "
            "card; --expert_policy cache computes nothing on the CPU"
        )
    return Ram(pinned=False), quantizer_of(plan.spec.scheme, CPU, plan.precision)


# ---------------------------------------------------------------------------------- how many


def policy_of(config: RunConfig) -> Policy:
    """The policy at the start of a run; auto chooses when the model is loaded."""
    return POLICIES["cache" if config.expert_policy == "auto" else config.expert_policy]


def require_enough(plan: Plan, count: int, nbytes: int) -> None:
    """Raise UsageError where fast memory for `count` experts is less than a layer needs."""
    config, mixture = plan.config, plan.architecture.mixture
    assert mixture is not None
    least = mixture.experts_per_token
    if policy_of(config).fetches and count < least:
        raise UsageError(
            f"--expert_memory {config.expert_memory} has room for {counted(count, 'expert')} of "
            f"{size(nbytes)}, and a layer needs the {least} of a token: --expert_memory {least} "
            f"({size(least * nbytes)}) is the least that works"
        )


def _free(plan: Plan) -> float:
    """Bytes for experts when everything else is loaded: what is free without the KV cache, the
    activations of a pass and a reserve."""
    free = devices.free_memory(plan.device)
    if free is None:
        raise UsageError(
            f"--expert_memory auto: {plan.device} does not say how much memory is free; give a "
            "size, such as 8GB"
        )
    config, architecture = plan.config, plan.architecture
    cached = kv_cache_bytes(
        architecture, config.batch_size, plan.cache_size, plan.precision, plan.cache
    )
    return max(0.0, free * (1 - RESERVE) - cached - activation_bytes(plan))


def activation_bytes(plan: Plan) -> float:
    """Bytes that a pass takes at most, without weights and caches: float32 where some are."""
    config, architecture = plan.config, plan.architecture
    rows = config.batch_size
    chunk = config.prefill_chunk or devices.prefill_chunk(plan.device, rows)
    tokens = rows * min(chunk, len(plan.prompt))
    mixture = architecture.mixture
    assert mixture is not None
    heads = architecture.num_heads + 2 * architecture.num_kv_heads
    wide = max(
        2 * architecture.ffn_dim,
        2 * mixture.expert_dim,
        2 * mixture.shared_dim,
        heads * architecture.head_dim,
    )
    each = (4 + mixture.experts_per_token) * architecture.dim + 2 * wide
    return 4.0 * (tokens * each + 2 * rows * architecture.vocab_size)


# ---------------------------------------------------------------------------------- after loading


def settle(plan: Plan, tiers: Tiers, model: Transformer, say: Say) -> None:
    """Bring the first experts into fast memory, as --expert_placement says.

    Raises UsageError for too little memory, or for counts that are not of this model; TierError.
    """
    config, every = plan.config, len(tiers.keys)
    tiers.attach(model)
    nbytes = tiers.layout.nbytes
    free = _free(plan) if config.expert_memory == "auto" else 0.0
    count = min(expert_slots(config, nbytes, free), every)
    require_enough(plan, count, nbytes)
    routers = identity(model)

    def fill() -> None:
        capacity = every if count == every else count - tiers.least
        tiers.hold(placed(config, routers, capacity), count)

    fill()
    if config.expert_policy == "auto" and count < every:
        chosen = _faster(plan, tiers, model)
        say(f"--expert_policy auto: {chosen.name} is faster here")
        if chosen != tiers.policy:
            tiers.policy = chosen
            fill()
    say(tiers.sentence())


def _faster(plan: Plan, tiers: Tiers, model: Transformer) -> Policy:
    """The policy whose decoding steps are faster, as the run will take them."""
    config, placement = plan.config, (plan.precision, plan.device)
    rows = config.batch_size
    kernel = decoding.attention_of(plan.cache, model.config, *placement).name
    caches = decoding.caches_of(plan.cache, model.config, rows, POSITIONS, *placement, kernel)
    decoder = decoding.choose(config.decoder, model, caches, rows)
    return faster(tiers, decoder.step, plan.prompt, rows)


@torch.no_grad()
def faster(
    tiers: Tiers, step: Callable[[Tensor, Tensor], object], prompt: Sequence[int], rows: int
) -> Policy:
    """The policy whose steps take less time. Results do not depend on it.

    Steps of both policies alternate, over the tokens of the run's own prompt, so that both meet the
    same routing and the same machine. Before a step that computes in place, the system drops the
    experts' pages from its page cache: the policy is chosen for a machine whose memory is used up,
    where --expert_memory is all that experts have.

    step: takes tokens (rows, 1) and a position (1,), on the tiers' device. prompt: token numbers,
    which are taken again and again. Raises TierError.
    """
    tokens = torch.tensor(prompt).repeat(-(-POSITIONS * rows // len(prompt)))
    tokens = tokens[: POSITIONS * rows].view(POSITIONS, rows, 1).to(tiers.device)
    before, policy = tiers.counted(), tiers.policy
    seconds: dict[Policy, list[float]] = {candidate: [] for candidate in CANDIDATES}
    try:
        for position, token in enumerate(tokens):
            tiers.policy = CANDIDATES[position % len(CANDIDATES)]
            if not tiers.policy.fetches:
                tiers.slow.drop()
            started = time.perf_counter()
            step(token, torch.tensor([position], device=tiers.device))
            devices.synchronize(tiers.device)
            seconds[tiers.policy].append(time.perf_counter() - started)
    finally:
        tiers.slow.drop()  # what the last steps read would count as free memory
        tiers.policy = policy
        tiers.counted()
        tiers.traffic = before
    return min(CANDIDATES, key=lambda candidate: statistics.median(seconds[candidate][1:]))


def placed(config: RunConfig, routers: Routers, capacity: int) -> Fast:
    """The placement that --expert_placement asks for. Raises UsageError."""
    option, placement = "--expert_placement", config.expert_placement
    if placement not in PLACEMENTS:
        return from_file(option, placement, routers, capacity)
    popularity = find(routers, f"{option} {placement}") if placement == "popularity" else None
    return place(placement, routers, capacity, popularity, config.seed)
