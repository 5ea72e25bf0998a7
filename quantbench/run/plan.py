"""The plan of a run: everything that is known before any weights are read, checked.

plan = make_plan(config)        # a value
plan.spec, plan.prompt, plan.cache_size
plan = begin(plan)              # threads are set, and ranks joined
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quantbench import devices, environment
from quantbench.errors import CheckpointError, UsageError
from quantbench.kv_cache import CACHES
from quantbench.kv_cache.base import KVCache
from quantbench.log.config import RunConfig, Unsaid, refuse_former
from quantbench.log.record import held_name
from quantbench.models import SAVED
from quantbench.models.config import ModelConfig
from quantbench.models.formats import Checkpoint, open_checkpoint, saver_of
from quantbench.models.tokenizer import Tokenizer
from quantbench.ops.ranks import ALONE, Ranks
from quantbench.progress import say
from quantbench.quantize.registry import kernels_for
from quantbench.quantize.spec import AsIs, Selection, Spec, named, parse, parse_layer, refuse_format

if TYPE_CHECKING:
    from quantbench.models.split import Split
    from quantbench.quantize.recipe import Recipe

INTERACTIVE_CACHE = 4096  # positions for --interactive; less if the model's context is shorter


@dataclass(frozen=True)
class Plan:
    """A run that was checked as far as that is possible without the weights."""

    config: RunConfig  # with device and quantization resolved: no "auto"
    checkpoint: Checkpoint
    device: torch.device
    precision: torch.dtype  # of what is not quantized
    spec: Spec | Selection
    architecture: ModelConfig
    tokenizer: Tokenizer
    prompt: list[int]  # token ids, the same for each row
    cache_size: int  # positions
    kv_cache: str  # its kind, a name of CACHES
    split: Split | None = None  # this rank's share; None if there is one rank

    @property
    def name(self) -> str:
        """The model's name in the log."""
        return self.checkpoint.name

    @property
    def notes(self) -> tuple[str, ...]:
        """What somebody has to know of the tokenizer and of the file."""
        notes = (*self.tokenizer.notes, *self.checkpoint.notes)
        states, layers = len(self.architecture.recurrent_layers), self.architecture.num_layers
        if states and self.kv_cache != "dense":
            notes += (
                f"--kv_cache {self.kv_cache} is for the {layers - states} layers with attention; "
                f"the states of {states} others stay in float32",
            )
        return notes

    @property
    def cache(self) -> type[KVCache]:
        return CACHES[self.kv_cache]

    @property
    def ranks(self) -> Ranks:
        return self.split.ranks if self.split else ALONE


def make_plan(config: RunConfig, like: Plan | None = None) -> Plan:
    """Resolve the device, scheme, kernel, architecture and tokenizer, and check that they fit.

    like: a plan whose tokenizer is taken where it is of the same checkpoint.
    Raises UsageError for options that name nothing or contradict each other, CheckpointError for a
    checkpoint whose description cannot be read, KernelError for a kernel that cannot run.
    """
    refuse_former(config)
    where = environment.place()
    config = dataclasses.replace(
        config,
        threads=environment.threads_of(config).recorded,
        tp=where.size if where else config.tp,
    )
    checkpoint = open_checkpoint(config.checkpoint_path)
    spec, checkpoint = scheme_of(config, checkpoint)
    if config.format != RunConfig.format:
        refuse_format(spec, config.format)
        if reason := saver_of(config.format).refuses(checkpoint):
            raise UsageError(f"--format {config.format}: {reason}")
    device = devices.resolve(config.device)
    config = dataclasses.replace(
        config, device=str(device), quantization=str(spec), kv_cache=_kv_cache_of(config, spec)
    )
    if config.memory_profile and device.type not in ("cuda", "cpu"):
        raise UsageError(f"--memory_profile works on cuda and cpu, not on {device.type}")
    if where:
        from quantbench.parallel import join as parallel

        parallel.warning(where, device)  # raises what cannot be
    precision: torch.dtype = getattr(torch, config.precision)
    architecture = checkpoint.config().with_layers(config.num_layers)
    # The result of a model whose name no log line can hold would be lost.
    if not (config.interactive or config.dry_run) and not held_name(checkpoint.name):
        raise UsageError(
            f"--checkpoint_path: the model is named {checkpoint.name!r}, which no log line can "
            "hold; rename its folder, or make a link to it"
        )
    if like and like.config.checkpoint_path == config.checkpoint_path:
        tokenizer = like.tokenizer
    else:
        tokenizer = checkpoint.tokenizer(architecture.vocab_size)
    if spec.scheme:
        kernels_for(spec.scheme, config.kernel, device, precision)
    if config.prefill_size:  # checked before prompt_of draws the numbers
        positions(config, config.prefill_size, architecture.max_position)
    split = split_of(config, spec, architecture, checkpoint)
    prompt = prompt_of(config, architecture.vocab_size, tokenizer)
    cache_size = positions(config, len(prompt), architecture.max_position)
    plan = Plan(
        config=config,
        checkpoint=checkpoint,
        device=device,
        precision=precision,
        spec=spec,
        architecture=architecture,
        tokenizer=tokenizer,
        prompt=prompt,
        cache_size=cache_size,
        kv_cache=kv_cache(config),
        split=split,
    )
    if config.expert_memory is not None:
        from quantbench.experts import loading as tiers

        tiers.check(plan)
    return plan


def begin(plan: Plan) -> Plan:
    """Set torch's threads as a plan says, and join its ranks: the plan, its ranks able to exchange
    numbers. Prints a warning where threads or ranks have to share cores."""
    where = environment.place()
    environment.use_threads(plan.config)
    if where is None or plan.split is None:
        return plan
    from quantbench.parallel import join as parallel

    line = parallel.warning(where, plan.device)
    if line and where.rank == 0:
        say(line)
    ranks = parallel.join(where, plan.device)
    return dataclasses.replace(plan, split=dataclasses.replace(plan.split, ranks=ranks))


def split_of(
    config: RunConfig, spec: Spec | Selection, architecture: ModelConfig, checkpoint: Checkpoint
) -> Split | None:
    """This rank's share of the model; None if there is one rank.

    Raises UsageError where ranks cannot share the model, or this process is not one of them;
    KernelError for a scheme whose groups do not fit.
    """
    if config.tp == 1:
        return None
    where = environment.place()
    if where is None:
        raise UsageError(
            f"--tp {config.tp}: this command measures one process; `python generate.py --tp "
            f"{config.tp}` starts ranks"
        )
    return _share(Ranks(where.rank, where.size), spec, architecture, checkpoint)


def check_ranks(plan: Plan, size: int) -> None:
    """Raise UsageError or KernelError where so many ranks of one machine cannot share the model
    that is planned for one process."""
    from quantbench.parallel import join as parallel

    parallel.warning(environment.Place(0, size, 0, size), plan.device)
    _share(Ranks(0, size), plan.spec, plan.architecture, plan.checkpoint)


def _share(
    ranks: Ranks, spec: Spec | Selection, architecture: ModelConfig, checkpoint: Checkpoint
) -> Split:
    from quantbench.models.split import check_split
    from quantbench.parallel.split_loading import split_for

    check_split(architecture, ranks.size)
    saved = checkpoint.saved
    if saved is None and spec.calibrated:
        raise UsageError(
            f"--tp {ranks.size}: {spec} is calibrated, which one process does; let it --save the "
            "model, and give that as --checkpoint_path"
        )
    layers = saved.layers if saved else None
    return split_for(architecture, ranks, spec.scheme, layers)


def _kv_cache_of(config: RunConfig, spec: Spec | Selection) -> str:
    """--kv_cache, or the recipe's. Raises UsageError where both are given and differ."""
    recipe, kind = _as_recipe(spec), kv_cache(config)
    of_recipe = recipe.kv_cache if recipe else None
    if of_recipe is None or of_recipe == kind:
        return config.kv_cache
    if kind != RunConfig.kv_cache:
        raise UsageError(
            f"--kv_cache {kind}: the recipe {spec} has kv_cache {of_recipe}; leave --kv_cache out"
        )
    return of_recipe


def scheme_of(config: RunConfig, checkpoint: Checkpoint) -> tuple[Spec | Selection, Checkpoint]:
    """The scheme of --quantization, or the one with which the checkpoint was saved; and the
    checkpoint that it applies to: a file of another program's may be quantized anew.

    Raises UsageError if both are given and differ, and for a recipe of another model;
    CheckpointError for a damaged quantbench.json.
    """
    spec, checkpoint = _chosen(config, checkpoint)
    if recipe := _as_recipe(spec):
        spec = recipe.of_layers(checkpoint.name, checkpoint.config().linear_shapes())
    return spec, checkpoint


def _as_recipe(spec: Spec | Selection) -> Recipe | None:
    """The scheme, if it is a recipe; other runs do not import recipes."""
    if not isinstance(spec, AsIs):
        return None
    from quantbench.quantize.recipe import Recipe

    return spec if isinstance(spec, Recipe) else None


def _chosen(config: RunConfig, checkpoint: Checkpoint) -> tuple[Spec | Selection, Checkpoint]:
    requested = parse(config.quantization)
    if checkpoint.saved is None:
        if requested == AsIs():
            raise UsageError(
                f"--quantization {requested}: {config.checkpoint_path} is in full precision; name "
                "a scheme, or leave --quantization out"
            )
        return requested, checkpoint
    floats = checkpoint.in_full_precision()
    if floats and requested != AsIs() and not isinstance(config.quantization, Unsaid):
        return requested, floats
    try:
        saved = named(checkpoint.saved.scheme)
        layers = {
            name: parse_layer(scheme) for name, (scheme, _) in checkpoint.saved.layers.items()
        }
    except UsageError as error:
        raise CheckpointError(f"{config.checkpoint_path}/{SAVED}: {error}") from None
    if config.save and not floats:
        raise UsageError(
            f"--save: {config.checkpoint_path} is quantized and saved; copy the folder"
        )
    if requested != saved and not isinstance(config.quantization, Unsaid):
        raise UsageError(
            f"--quantization {requested}: {config.checkpoint_path} was saved as "
            f"{checkpoint.saved.label or saved}; leave "
            "--quantization out, or load the full-precision checkpoint"
        )
    if isinstance(saved, AsIs):
        saved = AsIs(tuple(layers.items()), checkpoint.saved.label or str(saved))
    return saved, checkpoint


def prompt_of(config: RunConfig, vocab_size: int, tokenizer: Tokenizer) -> list[int]:
    """The token ids of --prompt, or --prefill_size random ones."""
    if not config.prefill_size:
        return tokenizer.encode(config.prompt)
    generator = torch.Generator().manual_seed(config.seed)
    drawn: list[int] = torch.randint(
        vocab_size, (config.prefill_size,), generator=generator
    ).tolist()
    return drawn


def positions(config: RunConfig, prompt: int, context: int) -> int:
    """How many positions the caches get.

    prompt: its tokens. context: positions for which the model was trained. Raises UsageError if the
    run needs more than --cache_size or the context.
    """
    if config.interactive:
        return config.cache_size or min(context, INTERACTIVE_CACHE)
    if prompt == 0:
        raise UsageError("--prompt is empty, and this tokenizer has no token to start with")
    needed = config.context_depth + prompt + config.max_new_tokens
    tokens = f"{prompt} prompt tokens and --max_new_tokens {config.max_new_tokens} need {needed}"
    if config.context_depth:
        tokens = f"--context_depth {config.context_depth}, {tokens}"
    if needed > context:
        raise UsageError(f"{tokens} positions; the model's context has {context}: ask for fewer")
    if config.cache_size and config.cache_size < needed:
        raise UsageError(f"{tokens} positions; --cache_size {config.cache_size} is too small")
    return config.cache_size or needed


def kv_cache(config: RunConfig) -> str:
    """The kind of cache that --kv_cache or --kv_cache_quantization asks for.

    Raises UsageError if they ask for different kinds.
    """
    if not config.kv_cache_quantization:
        return config.kv_cache
    if config.kv_cache not in ("dense", "int8"):
        raise UsageError(
            f"--kv_cache {config.kv_cache} and --kv_cache_quantization, which is --kv_cache int8: "
            "leave one out"
        )
    return "int8"
