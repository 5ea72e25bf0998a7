"""A card by published rows: passes as its rows are, by the two constants of estimate/published.py.

    machine = AsPublished(sheet, fitted(rows).on(sheet))
    predict(Request("opt-1.3b.json", batch=16, prompt=1024, new_tokens=0), machine)

A row is a pass without a cache, with the logits of every position, by transformers' own modules. So
is the estimate of a request without new tokens. What generates, is quantized or has several ranks
is estimated as on any card of which there is only a datasheet, at the shares of it that the two
constants are.
"""

from typing import Any

import torch

from quantbench.estimate.counting_configs import config_fields, count_config
from quantbench.estimate.datasheets import Datasheet
from quantbench.estimate.memory import CUBLAS_WORKSPACE
from quantbench.estimate.predict import (
    FromDatasheet,
    Memory,
    Phase,
    Request,
    efficiency_of_published,
)
from quantbench.estimate.published import UPCAST, Constants, Demand, demand_of, llama_fields
from quantbench.models.config import ModelConfig

PASS = "a pass as the published rows are: transformers' modules, logits of every position, no cache"


class AsPublished(FromDatasheet):
    """constants: those of the card that `sheet` describes."""

    def __init__(self, sheet: Datasheet, constants: Constants) -> None:
        super().__init__(sheet, efficiency_of_published(constants, sheet))
        self.constants, self.source = constants, constants.source
        self._demands: dict[Request, Demand] = {}

    def prompt(self, request: Request) -> Phase:
        demand = self._demand(request)
        if demand is None:
            return super().prompt(request)
        arithmetic = self.constants.per_operation * demand.operations
        weights = self.constants.per_byte * self.memory(request, "prompt").weights
        parts = {
            "products": max(arithmetic, weights),  # few tokens take as long as reading the weights
            "everything else": self.constants.per_byte * demand.bytes,
        }
        mostly = arithmetic > max(weights, parts["everything else"])
        bound = "arithmetic" if mostly else "memory's bandwidth"
        return Phase(parts, bound, self.constants.residual, f"{self.source}; {PASS}")

    def memory(self, request: Request, phase: str) -> Memory:
        demand = self._demand(request)
        if demand is None:
            return super().memory(request, phase)
        parts = dict(demand.peak.parts)
        weights = sum(size for name, size in parts.items() if "weights" in name)
        others = demand.peak.allocated - weights - CUBLAS_WORKSPACE
        return Memory(weights, 0, others, CUBLAS_WORKSPACE)

    def _demand(self, request: Request) -> Demand | None:
        """Operations, bytes and memory of the pass; None for a request that is no such pass."""
        fields = _fields(request.config)
        alone = not request.new_tokens and not request.depth
        if fields is None or not alone or request.scheme != "none" or request.tp > 1:
            return None
        if request not in self._demands:
            count = count_config(
                fields, request.batch, request.prompt, logits="all", precision=torch.float16,
                cached=False, name=str(fields["model_type"]),
            )  # fmt: skip
            upcast = fields["model_type"] in UPCAST
            self._demands[request] = demand_of(
                count, request.batch, request.prompt, fields["vocab_size"], upcast
            )
        return self._demands[request]


def _fields(config: ModelConfig | str) -> dict[str, Any] | None:
    """The config.json of a model in transformers; None for one that is none of its Llamas, and for
    one whose text model is a part of it."""
    if isinstance(config, str):
        fields = config_fields(config)
        return fields if "vocab_size" in fields else None
    return llama_fields(config)
