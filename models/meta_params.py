"""A model's architecture from the params.json of Meta's checkpoints.

from_params(json.loads(text), "Llama-2-7b", vocab_size=32000)       # a ModelConfig
"""

from collections.abc import Mapping
from typing import Any

from quantbench.errors import CheckpointError
from quantbench.models.accepted import COUNT, LAYERS, POSITIVE, TRUTH, whole
from quantbench.models.config import ModelConfig, RopeScaling
from quantbench.models.hugging_face import check_keys, head_width
from quantbench.text import shown

_PARAMS_ACCEPTED = {
    "n_layers": LAYERS,
    **dict.fromkeys(("dim", "n_heads", "n_kv_heads", "multiple_of"), COUNT),
    **dict.fromkeys(("ffn_dim_multiplier", "norm_eps", "rope_theta"), POSITIVE),
    "vocab_size": whole(-1),
    "use_scaled_rope": TRUTH,
}


def from_params(
    params: Mapping[str, Any],
    name: str,
    vocab_size: int | None = None,
    file: object | None = None,
) -> ModelConfig:
    """The architecture of a Meta checkpoint's params.json.

    vocab_size: rows of the embedding, for Llama 2's files, which give -1. The file does not give
    the context: with theta 500000 it is Llama 3's 8192, or 131072 if the rotation is scaled, and
    4096 otherwise. Raises CheckpointError for missing, impossible or unknown values.
    """
    where = file or name
    unknown = sorted(params.keys() - _PARAMS_ACCEPTED.keys())
    if unknown:
        raise CheckpointError(f"{where}: params.json key {shown(unknown[0])} is not understood")
    missing = [key for key in ("dim", "n_layers", "n_heads", "norm_eps") if params.get(key) is None]
    if missing:
        raise CheckpointError(f"{where}: params.json has no {', '.join(missing)}")
    check_keys(where, _PARAMS_ACCEPTED, params)
    params = {key: value for key, value in params.items() if value is not None}
    dim, heads = params["dim"], params["n_heads"]
    head_dim = head_width(dim, heads, where)
    multiple = params.get("multiple_of", 256)
    # Three matrices of width 2/3 · 4 · dim have as many parameters as two of width 4 · dim.
    width = int(min(int(2 * 4 * dim / 3) * params.get("ffn_dim_multiplier", 1.0), 2**40))
    stated = params.get("vocab_size", -1)
    vocab = stated if stated > 0 else vocab_size
    if vocab is None:
        raise CheckpointError(f"{where}: params.json has no vocab_size")
    theta = params.get("rope_theta", 10000.0)
    scaled = bool(params.get("use_scaled_rope"))
    # Meta's own code scales by 8 for 3.1; the 1 B and 3 B models of 3.2 were published with 32.
    factor = 32.0 if dim in (2048, 3072) else 8.0
    context = (131072 if scaled else 8192) if theta == 500000.0 else 4096
    return ModelConfig(
        name=name,
        dim=dim,
        num_layers=params["n_layers"],
        num_heads=heads,
        num_kv_heads=params.get("n_kv_heads") or heads,
        head_dim=head_dim,
        ffn_dim=-(-width // multiple) * multiple,
        vocab_size=vocab,
        max_position=context,
        norm_eps=params["norm_eps"],
        rope_theta=theta,
        rope_scaling=RopeScaling(factor) if scaled else None,
    )
