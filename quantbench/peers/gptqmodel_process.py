"""GPTQModel's side of peers/runtimes.py, run by the Python that has it; only that is imported.

    python gptqmodel_process.py CHECKPOINT THREADS

A line of JSON says what was loaded. Then for each line {"prompt": [ids], "new": N} one with the
seconds of each new token; the first one's has the prompt's.
"""

import json
import os
import sys
import time


def main(checkpoint: str, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not come between the answers
    import gptqmodel
    import torch

    torch.set_num_threads(threads)
    model = gptqmodel.GPTQModel.load(checkpoint, device="cpu").model.eval()
    layers = {type(module).__name__ for module in model.modules()}
    kernel = ", ".join(
        sorted(name for name in layers if name.endswith("Linear") and name != "Linear")
    )
    parts = [*model.parameters(), *model.buffers()]
    table = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is table
    loaded = {
        "vocab": model.config.vocab_size,
        "weight_bytes": sum(part.nbytes for part in parts) - (0 if is_tied else table.nbytes),
        "about": f"GPTQModel {gptqmodel.__version__}, torch {torch.__version__}, kernel {kernel}, "
        f"activations and cache in {table.dtype}",
    }
    print(json.dumps(loaded), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        tokens, cache, seconds = torch.tensor([asked["prompt"]]), None, []
        with torch.inference_mode():
            for _ in range(asked["new"]):
                started = time.perf_counter()
                made = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                tokens, cache = made.logits[:, -1:].argmax(-1), made.past_key_values
                seconds.append(time.perf_counter() - started)
        print(json.dumps(seconds), file=answers)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
