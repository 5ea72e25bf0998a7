"""From --expert_memory to experts in two tiers: the slow one is a disk, or RAM under a card.

tiers = open_tiers(plan, quantizer, say)    # before weights are read
model = load_model(…, transform=tiers.after(quantizer))
settle(plan, tiers, model, say)             # some experts are in fast memory now
"""

from collections.abc import Callable
from pathlib import Path

import torch

from quantbench import devices, files
from quantbench.devices import stored_bytes
from quantbench.errors import UsageError
from quantbench.experts import trial
from quantbench.experts.layout import whole_pages
from quantbench.experts.placement import PLACEMENTS, Fast, from_file, place
from quantbench.experts.popularity import Routers, find
from quantbench.experts.routing import identity, routers_of
from quantbench.experts.slow import Memory, SlowTier, Unusable, new_file
from quantbench.experts.tiers import POLICIES, Policy, Tiers
from quantbench.log.config import RunConfig
from quantbench.log.kinds import room_bytes
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Transformer
from quantbench.models.loading import Stages
from quantbench.models.mixtral import MixtureOfExperts
from quantbench.quantize.mixed import quantizer_of
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import Spec
from quantbench.run import decoding
from quantbench.run.plan import Plan
from quantbench.run.saved_experts import SavedTier, open_saved
from quantbench.run.sizes import kv_cache_bytes, shapes_of
from quantbench.text import counted, size

Say = Callable[[str], None]
RESERVE = 0.1  # share of the free memory that --expert_memory auto leaves free
CPU = torch.device("cpu")


def check(plan: Plan) -> None:
    """Raise UsageError for options about experts that cannot be followed, as far as that is known
    before weights are read: too little memory, counts of another model."""
    config, device = plan.config, plan.device
    routers = routers_of(plan.architecture)  # refuses a model without experts
    if config.expert_folder and device.type != "cpu":
        raise UsageError(
            f"--expert_folder: with --device {device} experts lie in RAM, not on disk: leave it out"
        )
    if plan.spec.scheme and config.expert_memory != "auto":
        how = plan.spec.scheme, device, plan.precision, config.kernel
        nbytes = expert_bytes(plan.architecture, *how)
        require_enough(config, plan.architecture, expert_slots(config, nbytes, 0), nbytes)
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
        return Tiers(Memory(pinned=True), *rest)
    if saved := _saved(plan, quantizer, say):
        tiers = Tiers(saved.slow, *rest)
        tiers.are_stored(saved.linears)
        return tiers
    if config.save and not config.expert_folder:
        return Tiers(new_file(Path(config.save), kept=True), *rest)
    return Tiers(new_file(_folder(config)), *rest)


def _saved(plan: Plan, quantizer: Quantizer | None, say: Say) -> SavedTier | None:
    """The experts that --save wrote into the checkpoint folder, without --expert_folder."""
    config = plan.config
    if config.expert_folder or config.save or plan.checkpoint.saved is None:
        return None
    try:
        if quantizer and (saved := open_saved(plan, quantizer)):
            return saved
        reason = f"{config.checkpoint_path} holds no file of them"
    except Unusable as unusable:
        reason = str(unusable)
    say(
        f"{reason}: experts are written into {_folder(config)} until the run ends; generate.py "
        "--save with --expert_memory writes them once"
    )
    return None


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
    return Memory(pinned=False), quantizer_of(plan.spec.scheme, CPU, plan.precision)


# ---------------------------------------------------------------------------------- how many


def expert_bytes(
    architecture: ModelConfig,
    spec: Spec,
    device: torch.device,
    precision: torch.dtype,
    kernel: str = "auto",
) -> int:
    """Bytes of one expert of a mixture, as its kernels hold it. Raises KernelError as `size_of`."""
    model = shapes_of(architecture, spec, device, precision, kernel).model
    mixtures = (module for module in model.modules() if isinstance(module, MixtureOfExperts))
    return sum(map(stored_bytes, next(mixtures).experts[0].parameters()))


def expert_slots(config: RunConfig, nbytes: int, free: float) -> int:
    """For how many experts of so many bytes --expert_memory has room.

    free: bytes for them, where it is "auto".
    """
    asked = config.expert_memory
    assert asked is not None
    if asked.isdigit():
        return int(asked)
    room = room_bytes(asked)
    return int((free if room is None else room) // whole_pages(nbytes))


def slow_bytes(
    config: RunConfig,
    architecture: ModelConfig,
    spec: Spec,
    device: torch.device,
    precision: torch.dtype,
) -> int:
    """Bytes of the experts that --expert_memory leaves in slow memory alone, at most."""
    mixture = architecture.mixture
    assert mixture is not None
    nbytes = expert_bytes(architecture, spec, device, precision, config.kernel)
    layers = sum(not mixture.is_dense(layer) for layer in range(architecture.num_layers))
    least = mixture.experts_per_token * nbytes  # what "auto" takes where there is nothing more
    return max(0, layers * mixture.num_experts - expert_slots(config, nbytes, least)) * nbytes


def policy_of(config: RunConfig) -> Policy:
    """The policy at the start of a run; auto chooses when the model is loaded."""
    return POLICIES["cache" if config.expert_policy == "auto" else config.expert_policy]


def require_enough(config: RunConfig, architecture: ModelConfig, count: int, nbytes: int) -> None:
    """Raise UsageError where fast memory for `count` experts is less than a layer needs."""
    mixture = architecture.mixture
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
    require_enough(config, plan.architecture, count, nbytes)
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
    config, how = plan.config, (plan.precision, plan.device)
    rows = config.batch_size
    kernel = decoding.attention_of(plan.cache, model.config, *how).name
    own = decoding.caches_of(plan.cache, model.config, rows, trial.POSITIONS, *how, kernel)
    decoder = decoding.choose(config.decoder, model, own, rows)
    return trial.faster(tiers, decoder.step, plan.prompt, rows)


def placed(config: RunConfig, routers: Routers, capacity: int) -> Fast:
    """The placement that --expert_placement asks for. Raises UsageError."""
    option, how = "--expert_placement", config.expert_placement
    if how not in PLACEMENTS:
        return from_file(option, how, routers, capacity)
    popularity = find(routers, f"{option} {how}") if how == "popularity" else None
    return place(how, routers, capacity, popularity, config.seed)
