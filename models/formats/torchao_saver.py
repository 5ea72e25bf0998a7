"""--save --format torchao: an int8wo model as transformers loads it, in torchao's Int8Tensor.

Tensors are named as in formats/torchao.py; the metadata of a file says which class they make.
"""

import json
from typing import Any

from quantbench.models.formats import torchao
from quantbench.models.formats.base import Checkpoint
from quantbench.models.formats.given_back import CompressedTensorsSaver
from quantbench.ops.formats import Packed


class TorchaoSaver(CompressedTensorsSaver):
    """Writes a Hugging Face folder of int8 weights with one scale for each row."""

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
