"""--save --format compressed-tensors: a quantized model as transformers and vLLM load it; and
--format torchao: an int8wo model as transformers loads it.

The folder is the Hugging Face folder that the model came from, with quantized layers as
compressed_tensors.py reads them. How a scheme rounds activations is not written: who loads the
folder multiplies by the same weights, and keeps activations in --precision. A checkpoint whose file
says how is refused (quantize.spec.Stored.fits). Tensors of torchao are named as in torchao.py; the
metadata of a file says which class they make.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantbench.models.config import ModelConfig
from quantbench.models.formats import compressed_tensors, torchao
from quantbench.models.formats.base import Checkpoint, SavedScheme, read_json
from quantbench.models.formats.hugging_face import HuggingFace
from quantbench.models.formats.saver import INDEX, Saver
from quantbench.models.registry import of_config
from quantbench.ops.formats import Packed


class CompressedTensorsSaver(Saver):
    """Writes a Hugging Face folder, from a checkpoint that `refuses` gives no reason against."""

    last, stem = "config.json", "model"

    @staticmethod
    def refuses(checkpoint: Checkpoint) -> str | None:
        if not isinstance(checkpoint, HuggingFace):
            return f"{checkpoint.name} is no Hugging Face folder, whose config.json would be needed"
        config, source = checkpoint.config(), checkpoint._stacked()
        if source.interleaved or config.rotary_dim not in (None, config.head_dim):
            return f"the rows of {checkpoint.name} are reordered for our kernels, and not back"
        if of_config(config).stacked_experts:
            return f"tensors of {checkpoint.name} are separated or renamed here, and not put back"
        return None

    def __init__(self, folder: Path, scheme: SavedScheme, checkpoint: Checkpoint) -> None:
        self.source = checkpoint._stacked()
        self.described = read_json(checkpoint.folder / self.last)
        self.groups: dict[str, dict[str, Any]] = {}  # by their text; with the layers as targets
        self.floats: list[str] = []  # layers that are not quantized
        self.precision: torch.dtype = getattr(torch, str(scheme.precision))
        self.index: dict[str, str] = {}
        super().__init__(folder, scheme, checkpoint)

    def add(self, name: str, module: nn.Module) -> None:
        tied = self.source.config.tie_embeddings and name == "output"
        if tied and not hasattr(module.weight, "parts"):
            return
        for kind, parameter in module.named_parameters(recurse=False):
            full, value = f"{name}.{kind}", parameter.data
            parts = ("lm_head.weight",) if tied else self.source.pieces(full)
            rows = [shape[0] for shape in self.source.shapes(full, value)]
            for part, piece in zip(parts, value.split(rows), strict=True):
                if packed := getattr(piece, "parts", None):
                    self._add_packed(part, packed)
                else:
                    self.pending[part] = piece.contiguous().cpu()
                    if isinstance(module, nn.Linear) and kind == "weight":
                        self.floats.append(part.removesuffix(".weight"))
        self._flush_if_large()

    def _add_packed(self, part: str, packed: Packed) -> None:
        # The package dequantizes in the dtype of the scales.
        dtype = torch.promote_types(packed.scale.dtype, self.precision)
        packed = replace(packed, scale=packed.scale.to(dtype))
        settings = compressed_tensors.group(packed, [])
        self.groups.setdefault(str(settings), settings)["targets"].append(
            part.removesuffix(".weight")
        )
        for end, tensor in compressed_tensors.written(packed).items():
            self.pending[part + end] = tensor.contiguous().cpu()

    def _flush(self) -> None:
        names = list(self.pending)
        super()._flush()
        self.index |= dict.fromkeys(names, self.files[-1])

    def _described(self, architecture: ModelConfig, *_: object) -> dict[str, Any]:
        text = json.dumps({"metadata": {}, "weight_map": self.index}, indent=1)
        self._create(INDEX, lambda file: file.write_text(text + "\n", encoding="utf-8"))
        described = {k: v for k, v in self.described.items() if k not in ("dtype", "torch_dtype")}
        if "layer_types" in described:
            described["layer_types"] = described["layer_types"][: architecture.num_layers]
        return described | {
            "num_hidden_layers": architecture.num_layers,
            "tie_word_embeddings": not any(name.startswith("lm_head.") for name in self.index),
            "torch_dtype": self.scheme.precision,
            "quantization_config": self._quantization(),
        }

    def _quantization(self) -> dict[str, Any]:
        groups, ignored = list(self.groups.values()), self.floats
        if len(groups) > 1 or "model.embed_tokens" in groups[0]["targets"]:
            ignored = []  # layers are named one by one
        else:
            groups = [{**groups[0], "targets": ["Linear"]}]
        forms = {group["format"] for group in groups}
        return {
            "quant_method": compressed_tensors.METHOD,
            "quantization_status": "compressed",
            "format": forms.pop() if len(forms) == 1 else "mixed-precision",
            "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
            "ignore": ignored,
        }


class TorchaoSaver(CompressedTensorsSaver):
    """Writes int8 weights with one scale for each row, in torchao's Int8Tensor."""

    @staticmethod
    def refuses(checkpoint: Checkpoint) -> str | None:
        if checkpoint.config().mixture:
            return f"{checkpoint.name} is a mixture of experts, whose layers transformers stacks"
        return CompressedTensorsSaver.refuses(checkpoint)

    def _add_packed(self, part: str, packed: Packed) -> None:
        from torchao.quantization import Int8Tensor

        codes, scale = packed.planes[0].cpu(), packed.scale.cpu()
        self.pending[part] = Int8Tensor(codes, scale, [1, codes.shape[1]], self.precision)

    def _flush(self) -> None:
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

        names = [*json.loads(self.metadata.get("tensor_names", "[]")), *self.pending]
        self.pending, metadata = flatten_tensor_state_dict(self.pending)
        # transformers reads the names of all files' tensors from the last file.
        self.metadata |= metadata | {"tensor_names": json.dumps(names)}
        super()._flush()

    def _quantization(self) -> dict[str, Any]:
        from torchao.core.config import config_to_dict
        from torchao.quantization import Int8WeightOnlyConfig

        return {
            "quant_method": torchao.METHOD,
            "quant_type": {"default": config_to_dict(Int8WeightOnlyConfig(version=2))},
            "include_input_output_embeddings": True,
            "modules_to_not_convert": self.floats,
        }
