"""What llama_cpp.py runs: it answers one question of stdin. It imports nothing of ours, which would
take longer than the answer."""

import json
import sys
from collections.abc import Sequence

import numpy as np


def answer(file: str, texts: Sequence[str] = (), tokens: Sequence[int] = (), target: str = ""):
    from ik_llama_cpp import _ctypes_api as api
    from ik_llama_cpp._internals import IkContext, IkModel, make_batch

    model = IkModel(file)
    if not target:
        print(json.dumps([model.tokenize(t, add_bos=False) if t else [] for t in texts]))
        return
    context = IkContext(model, n_ctx=max(256, len(tokens)), n_threads=1, flash_attn=False)
    batch = make_batch(list(tokens))
    for position in range(len(tokens)):
        batch.logits[position] = 1
    assert context.decode(batch) == 0
    rows = [api.llama_get_logits_ith(context.ctx, i)[: model.n_vocab] for i in range(len(tokens))]
    np.save(target, np.array(rows, np.float32))


if __name__ == "__main__":
    answer(sys.argv[1], **json.load(sys.stdin))
