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

from quantbench import devices, host
from quantbench.errors import KernelError
from quantbench.log.config import NOT_TIMED, option_table
from quantbench.models.config import compiles
from quantbench.models.llama import Transformer
from quantbench.quantize.spec import Spec
from quantbench.run import decoding
from quantbench.run.environment import choose_threads
from quantbench.run.plan import Plan
from quantbench.run.sizes import shapes_of


def identity(plan: Plan) -> dict[str, str]:
    """What the run does, by the option's name. Nothing is loaded or built but shapes."""
    config = plan.config
    values: dict[str, Any] = {
        name: getattr(config, name) for name in option_table() if name not in NOT_TIMED
    }
    values["quantization"] = plan.spec
    values["kv_cache"] = plan.kv_cache
    values["cache_size"] = plan.cache_size
    values["threads"] = choose_threads(config.threads, host.cores(), os.environ).count
    chunk = config.prefill_chunk or devices.prefill_chunk(plan.device, config.batch_size)
    values["prefill_chunk"] = min(chunk, len(plan.prompt))
    drawn = config.temperature > 0
    values["top_k"] = min(config.top_k, plan.architecture.vocab_size) if drawn else None
    if plan.spec.scheme is not None:
        values |= _carried_out(plan, plan.spec.scheme)
    return {name: str(value) for name, value in values.items()}


def _carried_out(plan: Plan, scheme: Spec) -> dict[str, object]:
    """The kernels, the decoder, and what is compiled, as far as shapes tell."""
    config = plan.config
    how = plan.precision, config.kernel
    shapes = shapes_of(plan.architecture, scheme, plan.device, *how)
    if shapes.reason:
        raise KernelError(shapes.reason)
    decoder = _decoder(plan, shapes.model)
    one_op = decoder == decoding.FUSED
    mixture, apart = plan.architecture.mixture, config.expert_memory is not None
    return {
        "kernel": shapes.kernels,
        "decoder": decoder,
        "compile": config.compile and compiles(mixture, plan.device.type, apart) and not one_op,
        "compile_prefill": config.compile_prefill and mixture is None,
    }


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
    return decoding.name_of(config.decoder, model, of_one, config.batch_size)[0]
