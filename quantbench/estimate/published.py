"""Published rows of one card as a calibration: memory from first principles, time by two constants.

    rows = counted_rows(read("published_a5000.rst"), folder)
    constants = fitted(rows)                        # of one card
    left_out(rows), chosen_without(rows)            # seconds of each row, by the others
    constants.seconds(rows[0].demand)
    constants.on(find("NVIDIA RTX A6000"))          # the same for a card that nobody measured

A row is one forward pass in float16 over all tokens, with the logits of every position, by the
model class of transformers. The two constants are seconds per operation of products, attention's
included, and seconds per byte of everything else. What a pass demands is counted from its config:

- Products: the columns of a matrix are rounded up to 256 (FORM.tile), the width of the tiles in
  which these cards multiply; a tile that is not full takes as long as a full one.
- Everything else: bytes that norms, rotations, gates, sums and attention read and write, each
  operation by itself, for nothing was compiled; and six passes over the logits (FORM.passes).

About the logits: until 4.45 transformers returned those of Llama in float32, made from float16 at
the end of the pass (https://github.com/huggingface/transformers/issues/30860). The measured memory
says that it was so here, and that afterwards one more tensor of their size was made from them, when
the hidden states were gone. It does not say which; the six rows of the A5000 fit best if the logits
are read or written six or eight times; a softmax (three reads and a write) and one copy do six.

FORM was chosen with these six rows in view, so that an error of one of them tests the constants
alone. `chosen_without` tests both: it chooses the form, too, by the other rows.
"""

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantbench.errors import CheckpointError, QuantbenchError, UsageError
from quantbench.estimate.audit_energy import cards
from quantbench.estimate.counting import Count
from quantbench.estimate.counting_configs import config_fields, count_config
from quantbench.estimate.datasheets import Datasheet, known
from quantbench.estimate.memory import Peak, replay
from quantbench.estimate.plausible import ABOVE_DATASHEET
from quantbench.estimate.tables import Row, Table
from quantbench.models.config import ModelConfig
from quantbench.models.presets import preset


@dataclass(frozen=True)
class Form:
    """What is supposed of a pass, beside the two constants."""

    tile: int  # columns that are multiplied together
    passes: int  # over the logits after the pass


FORM = Form(tile=256, passes=6)
# Columns as they are, and widths of tiles that matrix libraries have; a pass that reads the logits
# mostly writes as much. With up to 14 passes the choices are the same.
FORMS = [Form(*pair) for pair in itertools.product((1, 64, 128, 256), range(2, 13, 2))]
UPCAST = {"llama", "mistral", "qwen2", "gemma"}  # model types whose logits became float32
AT_LEAST = 3  # rows of one card, for two constants and something to hold them against
ALIKE = 0.15  # cards whose peak per watt differs by less are limited by power alike

_LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 49152, "tie_word_embeddings": False}
_OPT: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def _clm(dim: int, ffn: int, layers: int, heads: int) -> dict[str, Any]:
    """A model of AICrossSim: three query heads for each key head."""
    return {
        **_LLAMA,
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 3,
    }


def _opt(dim: int, layers: int, heads: int = 32) -> dict[str, Any]:
    return {
        **_OPT,
        "hidden_size": dim,
        "word_embed_proj_dim": dim,
        "ffn_dim": 4 * dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


# From the config.json with which each was published, for tables that have none beside them.
CONFIGS: dict[str, dict[str, Any]] = {
    "opt-125m": _opt(768, 12, 12),
    "opt-1.3b": _opt(2048, 24),
    "opt-2.7b": _opt(2560, 32),
    "opt-6.7b": _opt(4096, 32),
    "clm-60m": _clm(384, 1408, 22, 6),
    "clm-200m": _clm(768, 2688, 24, 12),
    "clm-400m": _clm(960, 3328, 30, 15),
    "clm-1.1b": _clm(1536, 5376, 32, 24),
}


@dataclass(frozen=True)
class Demand:
    """The work and the memory that a pass asks of a card."""

    operations: float  # of products, in whole tiles, and of attention
    bytes: float  # of everything else
    flops: float  # of products and attention, as the model has them
    peak: Peak


@dataclass(frozen=True)
class Counted:
    """A published row, and what its pass demands."""

    row: Row
    tokens: int
    seconds: float | None  # measured
    memory: float | None  # measured, in units of 2**30 bytes
    demand: Demand
    energy: float | None = None  # measured, joules a token
    demands: Mapping[Form, Demand] = field(default_factory=dict)  # of FORMS


@dataclass(frozen=True)
class Constants:
    """What was fitted to the rows of one card."""

    device: str
    per_operation: float  # seconds
    per_byte: float  # seconds
    source: str
    residual: float  # root mean square of estimated ÷ measured - 1, over the rows of the fit

    def seconds(self, demand: Demand) -> float:
        return self.per_operation * demand.operations + self.per_byte * demand.bytes

    def refuse(self, where: str) -> None:
        """Raise QuantbenchError where the rows are faster than the datasheet of their card allows:
        then a unit, or what was timed, is not what the table says."""
        own = known(cards(self.device)[1])
        if own is None:
            return
        for what, rate, peak, unit in (
            ("multiply at", 1e-12 / self.per_operation, own.peak("float16") / 1e12, "Tflop/s"),
            ("read at", 1e-9 / self.per_byte, own.bandwidth / 1e9, "GB/s"),
        ):
            if rate > ABOVE_DATASHEET * peak:
                raise QuantbenchError(
                    f"{where}: by its rows {own.name} would {what} {rate:.0f} {unit}, and its "
                    f"datasheet has {peak:.0f}; check the unit of runtime, and the tokens of a pass"
                )

    def on(self, sheet: Datasheet) -> "Constants":
        """The constants of another card, by the ratio of the two datasheets.

        Bytes go by the memory's bandwidth. Products go by the dense peak, but by the power limit
        where that is less and both cards have about the same peak per watt: then they are made
        alike, and the limit sets the clock at which products run. On the A5000 the fit gives 67 %
        of the peak at the boost clock, so it does there.
        Raises UsageError for a card of the fit without a datasheet.
        """
        own = known(cards(self.device)[1])
        if own is None:
            raise UsageError(
                f"there is no datasheet of {self.device!r}, the card of the table, so its figures "
                "tell nothing about another card"
            )
        peaks, watts = sheet.peak("float16") / own.peak("float16"), sheet.power / own.power
        alike = abs(peaks / watts - 1) < ALIKE
        products = min(peaks, watts) if alike else peaks
        by = "power limit" if alike and watts < peaks else "dense float16 peak"
        bandwidth = sheet.bandwidth / own.bandwidth
        return replace(
            self,
            device=sheet.name,
            per_operation=self.per_operation / products,
            per_byte=self.per_byte / bandwidth,
            source=f"{self.source}; products × {products:.3f} ({by}), bytes × {bandwidth:.3f} "
            f"(bandwidth), by the datasheets of {own.name} and {sheet.name}",
        )


def demand_of(count: Count, batch: int, length: int, vocabulary: int, upcast: bool) -> Demand:
    """The demand of a pass with the logits of every position.

    upcast: whether the logits are returned in float32.
    """
    return demands_of(count, batch, length, vocabulary, upcast, [FORM])[FORM]


def demands_of(
    count: Count, batch: int, length: int, vocabulary: int, upcast: bool, forms: Sequence[Form]
) -> dict[Form, Demand]:
    """`demand_of` by several forms."""
    logits = batch * length * vocabulary
    result = logits * (4 if upcast else 2)
    attention = count.of_kind("attention")
    of_attention = sum(work.flops for work in attention)
    others = sum(
        work.bytes_read + work.bytes_written for work in (*count.of_kind("rest"), *attention)
    )
    others += logits * 6 if upcast else 0
    peak = replay(count, [batch * length * 8], logits_upcast=logits * 4 if upcast else 0, copies=1)

    def tiled(form: Form) -> float:
        return sum(work.flops * in_tiles(work.outer, form) for work in count.of_kind("linear"))

    return {
        form: Demand(tiled(form) + of_attention, others + form.passes * result, count.flops, peak)
        for form in forms
    }


def in_tiles(outer: int, form: Form = FORM) -> float:
    """Columns in whole tiles ÷ columns; 1 for a product that has no such columns."""
    return -(-outer // form.tile) * form.tile / outer if outer else 1.0


def counted_rows(table: Table, folder: Path | None = None) -> list[Counted]:
    """The rows of a table with what they demand. folder: where their configs lie, NAME.json.

    Raises QuantbenchError for a model without a config, or a table that does not say how many
    tokens a pass has.
    """
    if table.batch is None or table.length is None:
        raise QuantbenchError(
            f"{table.where}: the table does not say how many tokens a pass has; expected above "
            "it is a line such as: Input Sequence Size = 16 × 1024"
        )
    demands: dict[str, dict[Form, Demand]] = {}
    rows = []
    for row in table.rows:
        if row.model not in demands:
            try:
                fields = _fields(row.model, folder)
            except QuantbenchError:
                if any(cell.measured for cell in row.cells.values()):
                    raise
                continue  # a row of means
            count = count_config(
                fields, table.batch, table.length, logits="all", precision=torch.float16,
                cached=False, name=row.model,
            )  # fmt: skip
            upcast = fields["model_type"] in UPCAST
            pass_of = (count, table.batch, table.length, fields["vocab_size"], upcast)
            demands[row.model] = demands_of(*pass_of, FORMS)
        time, memory, energy = (
            number if (number := row.cell(q).measured) and number.value > 0 else None
            for q in ("runtime", "memory", "energy")
        )
        of_a_token = {"sequences": table.length, "": table.batch * table.length}
        rows.append(
            Counted(
                row,
                table.batch * table.length,
                None if time is None else table.seconds(time).value,
                None if memory is None else table.gibibytes(memory).value,
                demands[row.model][FORM],
                None
                if energy is None
                else table.joules(energy).value / of_a_token.get(table.energy_share, 1),
                demands[row.model],
            )
        )
    return rows


def _fields(model: str, folder: Path | None) -> dict[str, Any]:
    """What stands in a model's config.json: beside the table, or as it was published."""
    whole = model.strip("`* ")
    name = whole.rsplit("/", 1)[-1]
    places = (f"{name}.json", f"{name}/config.json", f"{whole}/config.json",
              f"{whole.replace('/', '--')}.json", f"{whole.replace('/', '_')}.json")  # fmt: skip
    paths = [] if folder is None else [folder / place for place in places]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        if name.lower() in CONFIGS:
            return CONFIGS[name.lower()]
        with contextlib.suppress(UsageError):
            if fields := llama_fields(preset(name)):
                return fields
        raise QuantbenchError(
            f"{model}: there is no config of it; put its config.json beside the table, as "
            f"{name}.json"
        )
    fields = config_fields(path)
    if "vocab_size" not in fields:
        raise CheckpointError(f"{path}: no config of transformers: it has no vocab_size")
    return fields


def llama_fields(config: ModelConfig) -> dict[str, Any] | None:
    """The config.json of a model in transformers; None for one that is none of its Llamas."""
    plain = {name: getattr(config, name) for name in ("qkv_bias", "qk_norm", "mlp_bias")}
    if config.architecture != "llama" or any(plain.values()) or config.attention_out_bias:
        return None
    return {
        "model_type": "llama",
        "hidden_size": config.dim,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_embeddings,
    }


def fitted(rows: Sequence[Counted], source: str = "published rows") -> Constants:
    """The two constants of the card that these rows are of, by least squares of relative errors.

    Raises QuantbenchError for rows of several cards, for fewer than three, and where a constant
    would be negative.
    """
    measured = [row for row in rows if row.seconds]
    devices = {row.row.device for row in measured}
    if len(devices) != 1 or len(measured) < AT_LEAST:
        raise QuantbenchError(
            f"two constants are fitted to {AT_LEAST} or more measured rows of one card; given are "
            f"{len(measured)} of {len(devices)}"
        )
    demands = np.array([[row.demand.operations, row.demand.bytes] for row in measured])
    seconds = np.array([row.seconds for row in measured])
    relative = demands / seconds[:, None]
    scale = relative.max(axis=0)
    solution, *_ = np.linalg.lstsq(relative / scale, np.ones(len(measured)), rcond=None)
    per_operation, per_byte = (float(x) for x in solution / scale)
    if per_operation <= 0 or per_byte <= 0:
        raise QuantbenchError(
            "the measured rows do not tell products from the rest: a fit makes one of them take "
            "less than no time; give rows of models of different widths"
        )
    errors = relative @ np.array([per_operation, per_byte]) - 1
    residual = float(np.sqrt(np.mean(errors**2)))
    where = f"{source}: {len(measured)} rows of {measured[0].row.device}"
    return Constants(measured[0].row.device, per_operation, per_byte, where, residual)


def left_out(rows: Sequence[Counted]) -> list[float | None]:
    """Seconds of each row by constants that are fitted to the other rows of its card; None where
    these are too few."""
    return [_by_others(row, _others(row, rows)) for row in rows]


def chosen_without(rows: Sequence[Counted]) -> list[tuple[float, Form] | None]:
    """As `left_out`, with the form chosen by the other rows, too: the one of FORMS by which each of
    them is estimated best when it is left out in its turn. None where rows are too few for that, or
    fix no constants by any form."""
    return [_by_chosen(row, _others(row, rows)) for row in rows]


def _others(row: Counted, rows: Sequence[Counted]) -> list[Counted]:
    """The measured rows of the same card but this one and those of the same pass."""
    return [
        other
        for other in rows
        if other.demand != row.demand and other.row.device == row.row.device and other.seconds
    ]


def _by_others(row: Counted, others: Sequence[Counted]) -> float | None:
    return fitted(others).seconds(row.demand) if len(others) >= AT_LEAST else None


def _by_chosen(row: Counted, others: Sequence[Counted]) -> tuple[float, Form] | None:
    if len(others) <= AT_LEAST:
        return None
    errors = {form: _error(_in(form, others)) for form in FORMS}
    form = min(FORMS, key=errors.__getitem__)
    if math.isinf(errors[form]):
        return None
    return fitted(_in(form, others)).seconds(row.demands[form]), form


def _in(form: Form, rows: Sequence[Counted]) -> list[Counted]:
    return [replace(row, demand=row.demands[form]) for row in rows]


def _error(rows: Sequence[Counted]) -> float:
    """The root mean square of the rows' relative errors, each left out in its turn; infinite where
    the others fix no constants."""
    try:
        pairs = zip(left_out(rows), rows, strict=True)
    except QuantbenchError:
        return math.inf
    errors = [(seconds or 0.0) / (row.seconds or 1.0) - 1 for seconds, row in pairs]
    return float(np.sqrt(np.mean(np.square(errors))))
