"""What a plan makes of its options: two runs of equal identity do the same work in the same way.

    identity(make_plan(parse(["--kernel", "cpu"]))) == identity(make_plan(parse([])))

Options whose value is the default's, and options that have no effect given the others, leave no
trace: --threads as many as there are cores, --kernel or --decoder naming what auto takes,
--compile where a step is one op, --top_k at temperature 0. Everything else of the configuration is
in it by its name, so that an option which is new to RunConfig tells runs apart until a line here
says when it does not.
"""

import os
from typing import Any

import torch

from quantbench import devices, host
from quantbench.errors import KernelError
from quantbench.experts.routing import routers_of
from quantbench.log.config import option_table
from quantbench.models import build
from quantbench.models.llama import Transformer
from quantbench.models.mixture import compiles
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import Spec
from quantbench.run import decoding, threads
from quantbench.run.plan import Plan
from quantbench.run.sizes import expert_bytes, expert_slots
from quantbench.run.tiers import placed, policy_of

# Options that change no generated token's time: what is written where, and how much is measured.
NOT_TIMED = (
    *("num_samples", "write_result", "output_json_path", "profile", "memory_profile", "save"),
    *("dry_run", "interactive", "debug", "linear_causal_mask", "kv_cache_quantization"),
)


def identity(plan: Plan) -> dict[str, str]:
    """What the run does, by the option's name. Nothing is loaded or built but shapes."""
    config = plan.config
    values: dict[str, Any] = {
        name: getattr(config, name) for name in option_table() if name not in NOT_TIMED
    }
    values["quantization"] = plan.spec
    values["kv_cache"] = plan.kv_cache
    values["cache_size"] = plan.cache_size
    values["threads"] = threads.choose(config.threads, host.cores(), os.environ).count
    chunk = config.prefill_chunk or devices.prefill_chunk(plan.device, config.batch_size)
    values["prefill_chunk"] = min(chunk, len(plan.prompt))
    if config.temperature == 0:
        values["top_k"] = None
    else:
        values["top_k"] = min(config.top_k, plan.architecture.vocab_size)
    scheme = plan.spec.scheme
    if scheme is not None:
        values |= _carried_out(plan, scheme)
        if config.expert_memory is not None:
            values |= _experts(plan, scheme)
    return {name: str(value) for name, value in values.items()}


def _carried_out(plan: Plan, scheme: Spec) -> dict[str, object]:
    """The kernels, the decoder, and what is compiled, as far as shapes tell."""
    config = plan.config
    model, kernels = shapes(plan, scheme)
    decoder = _decoder(plan, model)
    one_op = decoder == decoding.FUSED
    mixture, apart = plan.architecture.mixture, config.expert_memory is not None
    return {
        "kernel": ", ".join(sorted(kernels)),
        "decoder": decoder,
        "compile": config.compile and compiles(mixture, plan.device.type, apart) and not one_op,
        "compile_prefill": config.compile_prefill and mixture is None,
    }


def _experts(plan: Plan, scheme: Spec) -> dict[str, object]:
    """How many experts the fast tier holds, which at first, and what the policy changes."""
    config, values = plan.config, dict[str, object]()
    if config.expert_memory in (None, "auto"):  # what is free then is not known before
        return values
    nbytes = expert_bytes(plan.architecture, scheme, plan.device, plan.precision, config.kernel)
    routers = routers_of(plan.architecture)
    every = sum(routers.experts)
    count = min(expert_slots(config, nbytes, 0), every)
    values["expert_memory"] = count
    if count == every:  # nothing is ever moved
        return values | dict.fromkeys(("expert_placement", "expert_policy"))
    fetches = policy_of(config).fetches
    capacity = count - fetches * routers.experts_per_token  # the others are where experts arrive
    if capacity <= 0:
        values["expert_placement"] = None
    elif config.expert_placement != "popularity":  # whose counts are those of weights, not read yet
        fast = placed(config, routers, capacity)
        values["expert_placement"] = list(map(sorted, fast))
    return values


def shapes(plan: Plan, scheme: Spec) -> tuple[Transformer, set[str]]:
    """A layer of each kind on the meta device, with the modules that kernels make of layers; and
    the kernels' names. Raises KernelError where none takes a layer."""
    with torch.device("meta"):
        model = build(plan.architecture.one_of_each_kind()).to(plan.precision)
    quantizer = Quantizer(scheme, plan.device, plan.precision, plan.config.kernel)
    for name in [name for name, module in model.named_modules() if module._parameters]:
        layer = quantizer.quantized(name, model.get_submodule(name))
        if isinstance(layer, torch.nn.Linear):
            kernel = quantizer.kernel_for(name, layer)
            quantizer.ran[kernel] += 1
            if kernel == "cpu":  # the one whose modules the fused decoders know
                layer = quantizer.scheme.kernels[kernel].build(layer, scheme)
        model.set_submodule(name, layer)
    return model, set(quantizer.ran) or {"torch"}


def _decoder(plan: Plan, model: Transformer) -> str:
    """The decoder's name. Raises KernelError for one that was named and cannot run."""
    config, shape = plan.config, plan.architecture
    if plan.device.type != "cpu":
        if config.decoder not in ("auto", decoding.MODULES):
            raise KernelError(f"--decoder {config.decoder} is C++ for the CPU, not {plan.device}")
        return decoding.MODULES
    kernel = decoding.attention_of(plan.cache, shape, plan.precision, plan.device).name
    how = plan.precision, "meta", kernel
    of_one = decoding.caches_of(plan.cache, shape, 1, 1, *how, layers=1)
    return decoding.name_of(config.decoder, model, of_one, config.batch_size)
