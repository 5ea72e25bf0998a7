"""Seconds of the products of a model's layers, by a calibration's curves; experts included.

    products(curves, config, "int8wo", rows=4, fused=True)  # of all layers; rows: batch · positions
    gates(curves, config, rows=4, fused=True)               # of what a mixture does beside them

A token goes through k of a layer's X experts. `rows` tokens choose X · (1 − (1 − k/X)^rows) experts
on average (Mixture.distinct), each with its share of the rows · k assignments: a decoding step of
one sequence reads k experts, a long prompt reads all of them, each for its own tokens.
"""

from dataclasses import replace

from quantbench.estimate.curves import Curves
from quantbench.models.config import ModelConfig

# Calls of an expert beside its two products, from Python: it takes its tokens out of all, gates,
# and adds what it computed to the sum, weighed (models/mixtral.py).
EXPERT_CALLS = 8
ROUTER_BYTES = 10  # of each of a router's weights: 2 are read, 4 written as float32 and read again


def products(
    curves: Curves, config: ModelConfig, scheme: str, rows: int, fused: bool, among: float = 0.0
) -> float:
    """Seconds of all layers' products. fused: whether a step is one op, so that an expert's
    products cost no call. among: bytes that the step reads."""
    shapes = config.one_of_each_kind().linear_shapes()
    total = 0.0
    for number, layers in enumerate(config.kinds_of_layers()):
        own = {n: s for n, s in shapes.items() if n.startswith(f"layers.{number}.")}
        for name, (outer, inner) in own.items():
            if ".experts." not in name:
                total += layers * curves.product(scheme, rows, inner, outer, False, among)
            elif ".experts.0." in name:
                total += layers * _experts(curves, config, scheme, rows, (outer, inner), fused)
    return total


def _experts(
    curves: Curves,
    config: ModelConfig,
    scheme: str,
    rows: int,
    shape: tuple[int, int],
    fused: bool,
) -> float:
    """One matrix of all experts that the rows choose, in one layer."""
    mixture = config.mixture
    assert mixture is not None
    distinct = mixture.distinct(rows)
    each = max(1, round(rows * mixture.experts_per_token / distinct))
    outer, inner = shape
    return distinct * curves.product(scheme, each, inner, outer, called=not fused)


def gates(curves: Curves, config: ModelConfig, rows: int, fused: bool) -> float:
    """Seconds of all layers' routers, and of the calls of their experts."""
    mixture = config.mixture
    if mixture is None:
        return 0.0
    routed = sum(not mixture.is_dense(layer) for layer in range(config.num_layers))
    router = ROUTER_BYTES * mixture.num_experts * config.dim / curves.speed.read
    calls = (
        0.0 if fused else mixture.distinct(rows) * EXPERT_CALLS * curves.calibration.call_seconds
    )
    return routed * (router + calls)


def gated(config: ModelConfig) -> ModelConfig:
    """The config with the width that a token's gates have, those of all of its experts."""
    mixture = config.mixture
    if mixture is None:
        return config
    width = mixture.experts_per_token * mixture.expert_dim + mixture.shared_dim
    return replace(config, ffn_dim=width)
