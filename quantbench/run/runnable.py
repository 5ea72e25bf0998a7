"""Whether kernels and decoders can run, told before weights are read."""

import contextlib

import torch

from quantbench import devices
from quantbench.errors import KernelError
from quantbench.log.config import RunConfig
from quantbench.quantize.registry import kernels_for
from quantbench.quantize.spec import MEASURED, SHOWN, parse_scheme
from quantbench.run import decoding
from quantbench.run.plan import Plan
from quantbench.run.sizes import shapes_of


def check(plan: Plan) -> None:
    """Raise KernelError for a shape without a kernel, or a kernel or decoder that was named and
    cannot run."""
    config, shape = plan.config, plan.architecture
    if plan.spec.scheme is None:
        return
    settings = plan.precision, config.kernel
    shapes = shapes_of(shape, plan.spec.scheme, plan.device, *settings)
    if shapes.reason:
        raise KernelError(shapes.reason)
    if plan.device.type != "cpu":
        if config.decoder not in ("auto", decoding.MODULES):
            raise KernelError(f"--decoder {config.decoder} is C++ for the CPU, not {plan.device}")
        return
    kernel = decoding.attention_of(plan.cache, shape, plan.precision, plan.device).name
    where = plan.precision, "meta", kernel
    of_one = decoding.caches_of(plan.cache, shape, 1, 1, *where, layers=1)
    decoding.name_of(config.decoder, shapes.model, of_one, config.batch_size)


def schemes(config: RunConfig) -> list[str]:
    """Every kind of scheme that has a kernel here."""
    where, names = (devices.resolve(config.device), getattr(torch, config.precision)), []
    for name in SHOWN:
        with contextlib.suppress(KernelError):
            kernels_for(parse_scheme(name), config.kernel, *where)
            names.append(name)
    return [*names, *MEASURED]
