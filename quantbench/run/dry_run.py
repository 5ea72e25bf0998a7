"""What --dry_run prints: sizes of a plan's model, and of its model in every scheme."""

import torch

from quantbench.errors import KernelError
from quantbench.quantize.spec import MEASURED, SHOWN, parse_scheme
from quantbench.run.plan import Plan
from quantbench.run.sizes import kv_cache_bytes, size_of, slow_bytes, state_bytes
from quantbench.text import aligned
from quantbench.text import size as size_text


def report(plan: Plan, free: int | None) -> str:
    """What --dry_run prints. free: bytes of memory that are free; None if not known."""
    config, architecture, spec, device = plan.config, plan.architecture, plan.spec, plan.device
    precision, positions = plan.precision, plan.cache_size
    rows = [("parameters", f"{architecture.parameters() / 1e9:.3f} billion")]
    cached = kv_cache_bytes(architecture, config.batch_size, positions, precision, plan.cache)
    cache = f"{cached / 1e9:.3f} GB for {positions} positions, batch {config.batch_size}"
    if states := state_bytes(architecture, config.batch_size, precision):
        cache += f", {states / 1e9:.3f} GB of it states, for any number of positions"
    scheme = spec.scheme
    if scheme is None:
        rows += [("model_size", f"not known before {spec} has measured"), ("KV cache", cache)]
    else:
        size = size_of(architecture, scheme, device, precision, config.kernel)
        slow = slow_bytes(config, architecture, size.expert_bytes)
        need = size.memory_bytes - slow + cached
        bits = f"{size.bits_per_weight:.2f} on average in the quantized linear layers"
        embedding = f"{size.embedding_bytes / 1e9:.2f} GB, not part of model_size"
        if size.model_bytes + size.embedding_bytes > size.memory_bytes:
            embedding += ", shared with the output layer"
        rows += [
            ("model_size", f"{size.model_bytes / 1e9:.2f} GB as {scheme}"),
            ("embedding", embedding),
            ("KV cache", cache),
        ]
        if slow:
            rows.append(("slow memory", f"{slow / 1e9:.2f} GB of experts, not part of total"))
        rows += [
            ("total", f"{need / 1e9:.2f} GB{_fitting(need, free, device)}"),
            ("bits per weight", bits),
            ("kernel", size.kernel or f"none: {size.reason}"),
        ]
    head = "\n".join(f"{name:<16} {text}" for name, text in rows)
    return f"{head}\n\n{table(plan, cached, free)}"


def _fitting(need: int, free: int | None, device: torch.device) -> str:
    if free is None:
        return ""
    fits = "fits" if need <= free else "does not fit"
    return f" for weights, embedding and KV cache: {fits}, {free / 1e9:.2f} GB of {device} are free"


def table(plan: Plan, cached: int, free: int | None) -> str:
    """A line for each kind of scheme: its size for this model, and its kernel on this device.

    cached: bytes of the KV cache. free: bytes of memory that are free; None if not known.
    """
    rows = [
        ("scheme", "model_size", "bits/weight", "total", "fits?", f"kernel on {plan.device.type}")
    ]
    for name in SHOWN:
        try:
            size = size_of(plan.architecture, parse_scheme(name), plan.device, plan.precision)
        except KernelError as error:
            rows.append((name, "-", "-", "-", "-", f"none: {error}"))
            continue
        need = size.memory_bytes + cached
        fits = "-" if free is None else "yes" if need <= free else "no"
        bits = f"{size.bits_per_weight:.2f}"
        kernel = size.kernel or f"none: {size.reason}"
        rows.append((name, size_text(size.model_bytes), bits, size_text(need), fits, kernel))
    rows += [(name, "measured", "measured", "measured", "-", "measured") for name in MEASURED]
    return (
        f"{aligned(rows, left={0, len(rows[0]) - 1})}\n"
        "total: model_size + embedding + KV cache. bits/weight: as --save writes them; model_size "
        "counts what the kernel holds, which may have wider scales."
    )
