"""Damaged files by the thousand: each is read, or refused in one line.

    python -m tests.fuzz [--inputs 100000] [--seed 7] [--only gguf]      make fuzz

Every kind of file that somebody else may have written starts as a small sound one, and is damaged:
bytes are changed, cut out, repeated, or, in JSON, values are replaced by what nobody expects. A
reader may raise a QuantbenchError, and nothing else; may take 10 s; and may take memory
of 2 × the file + 200 MB. What it does against that is printed once a place in the code, with the
file that shows it, and the exit code is 1. A process that dies leaves its file, too.
"""

import argparse
import contextlib
import faulthandler
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from quantbench.bench import store
from quantbench.errors import QuantbenchError
from quantbench.models import load
from quantbench.models.chat import chat_of
from quantbench.models.formats import open_checkpoint
from quantbench.models.tokenizer import load_tokenizer
from tests.compare.example_results import example_results
from tests.models.tiny_tokenizers import llama_2_json, sentencepiece_model, tiktoken_file
from tests.programs import ROOT, command, worked

SECONDS = 10
MEMORY = 200 << 20  # bytes, in addition to twice the file's
TEXT = "Hello  world\n\n 12,345 naïve 東京 <s> [INST]"
WIDTH, VOCABULARY = 32, 512
CONFIG = {
    **{"model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 64, "vocab_size": 512},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4},
    **{"rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float32"},
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] | "
    "trim }} [/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# What replaces a value in JSON.
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 2**31, 2**63, 10**30, 0.5, 1e308, float("nan"), float("inf"), ""),
    *("x", "../../etc/passwd", "0", "\x1b[2J", "\ud800", "a" * 5000, "<s>", [], [[]], [None], {}),
    *({"": None}, [0] * 300, {"a": {"a": {"a": 1}}}, "int8wo", "llama", "float32", -(2**40)),
)
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)


@dataclass(frozen=True)
class Kind:
    folder: Path  # sound
    name: str  # of the file in it that is damaged
    read: Callable[[Path], None]  # the folder
    share: int = 10  # of the inputs; slow readers get fewer


class TooLong(BaseException):
    pass


# ---------------------------------------------------------------------------------- sound files


def weights() -> dict[str, torch.Tensor]:
    """A llama's of CONFIG's shape, by Hugging Face's names."""
    attention = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {"mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64)}
    tensors = {f"model.layers.0.{n}.weight": torch.randn(shape) for n, shape in shapes.items()}
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = torch.randn(VOCABULARY, WIDTH)
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        tensors[f"model.{name}.weight"] = torch.ones(WIDTH)
    return tensors


def write_gguf(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCABULARY)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [chr(0x4E00 + number) for number in range(VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(VOCABULARY)])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (VOCABULARY - 259)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, tensor in tensors.items():
        values = tensor.numpy()
        quantized = values.ndim == 2 and "embed" not in name
        kind = gguf.GGMLQuantizationType.Q8_0 if quantized else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(values, kind) if quantized else values
        in_file = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(in_file, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_model(folder: Path) -> None:
    """Its config, its tokenizer and its weights, and a step with them."""
    checkpoint = open_checkpoint(str(folder))
    config = checkpoint.config()
    checkpoint.tokenizer(config.vocab_size).encode(TEXT)
    if config.dim <= 256 and config.num_layers <= 4 and config.vocab_size <= 4096:
        load(str(folder))


def read_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, 200_000)
    ids = tokenizer.encode(TEXT)
    tokenizer.decode([*ids, 0, 1, 2, 300])


def read_chat(folder: Path) -> None:
    chat_of(load_tokenizer(folder, 200_000), "fuzz").ask("What is it?")


def by_command(*words: str) -> Callable[[Path], None]:
    """A command that ends in one line where it fails."""

    def read(folder: Path) -> None:
        result = command(*(word.replace("FOLDER", str(folder)) for word in words))
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        errors = result.stderr.strip().split("\n")
        if result.exit_code not in (0, 1, 2) or (result.exit_code == 2 and len(errors) > 1):
            raise AssertionError(f"exit code {result.exit_code}: {result.stderr[-300:]!r}")

    return read


def kinds(top: Path) -> dict[str, Kind]:
    """A sound folder of each kind, below `top`."""
    tensors, model = weights(), sentencepiece_model()
    hugging_face = top / "model"
    hugging_face.mkdir(parents=True)
    (hugging_face / "config.json").write_text(json.dumps(CONFIG))
    (hugging_face / "tokenizer.json").write_text(json.dumps(llama_2_json(model)))
    config = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
    config |= {"added_tokens_decoder": {"1": {"content": "<s>", "special": True}}}
    (hugging_face / "tokenizer_config.json").write_text(json.dumps(config))
    save_file(tensors, hugging_face / "model.safetensors")
    for name, content in (("sentencepiece", model), ("tiktoken", tiktoken_file())):
        (top / name).mkdir()
        (top / name / "tokenizer.model").write_bytes(content)
    (top / "gguf").mkdir()
    write_gguf(top / "gguf" / "m.gguf", tensors)
    saved = "--quantization uintx-4-32 --num_samples 1 --max_new_tokens 1 --device cpu"
    saving = ("--write_result", "none", "--save", top / "saved", "--checkpoint_path", hugging_face)
    worked("generate", *saved.split(), *saving)
    example_results(folder=top / "results")
    (top / "log").mkdir()
    log = Path(__file__).parent / "data" / "torchao_llama_log.txt"
    (top / "log" / "b.txt").write_text("\n".join(log.read_text().splitlines()[:6]) + "\n")
    recommend, check = ("recommend", "--from", "FOLDER"), ("log", "check", "FOLDER/b.txt")
    return {
        "config": Kind(hugging_face, "config.json", read_model),
        "safetensors": Kind(hugging_face, "model.safetensors", read_model),
        "gguf": Kind(top / "gguf", "m.gguf", read_model),
        "saved": Kind(top / "saved", "quantbench.json", read_model),
        "tokenizer": Kind(hugging_face, "tokenizer.json", read_tokenizer),
        "tokenizer_config": Kind(hugging_face, "tokenizer_config.json", read_chat, 1),
        "sentencepiece": Kind(top / "sentencepiece", "tokenizer.model", read_tokenizer),
        "tiktoken": Kind(top / "tiktoken", "tokenizer.model", read_tokenizer),
        "results": Kind(top / "results", store.META, by_command(*recommend), 2),
        "samples": Kind(top / "results", store.SAMPLES, by_command(*recommend), 2),
        "log": Kind(top / "log", "b.txt", by_command(*check)),
    }


# ---------------------------------------------------------------------------------- damage


def damaged(data: bytes, draw: random.Random) -> bytes:
    """The file with one to four changes."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        in_json = data[:1] in (b"{", b"[") and draw.random() < 0.7
        data = _in_json(data, draw) if in_json else _in_bytes(data, draw)
    return data


def _in_bytes(data: bytes, draw: random.Random) -> bytes:
    # Headers lie at the beginning, and say more than what follows.
    end = len(data) if draw.random() < 0.4 else min(len(data), 600)
    at = draw.randrange(end + 1)
    length = draw.choice((1, 2, 4, 8, 40, 1000))
    width = draw.choice((1, 2, 4, 8))
    number = (draw.choice(NUMBERS) & (256**width - 1)).to_bytes(width, "little")
    match draw.randrange(7):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + data[at + length :]
        case 2:
            return (
                data[:at] + data[at : at + length] * draw.choice((2, 3, 50)) + data[at + length :]
            )
        case 3:
            return data[:at] + draw.randbytes(length) + data[at:]
        case 4:
            return data[:at] + draw.choice((b"9" * 20, b"-", b"\xff", b"\0", b"\n", b'"', b"{"))
        case 5:
            flipped = bytes(byte ^ (1 << draw.randrange(8)) for byte in data[at : at + 1])
            return data[:at] + flipped + data[at + 1 :]
        case _:
            return data[:at] + number + data[at + width :]


def _in_json(data: bytes, draw: random.Random) -> bytes:
    lines = data.split(b"\n") if data.count(b"\n{") else [data]  # JSON lines
    number = draw.randrange(len(lines))
    try:
        value = json.loads(lines[number])
    except (ValueError, RecursionError):
        return _in_bytes(data, draw)
    places = list(_places(value))
    if not places:
        return _in_bytes(data, draw)
    inside, key = draw.choice(places[:2000])
    match draw.randrange(5):
        case 0 if isinstance(inside, dict):
            del inside[key]
        case 1 if isinstance(inside, dict):
            inside[draw.choice(("", "unknown", "quantization_config", "rope_scaling"))] = inside[
                key
            ]
        case 2 if isinstance(inside[key], list):
            inside[key] = inside[key] * 2
        case _:
            inside[key] = draw.choice(VALUES)
    lines[number] = json.dumps(value).encode("utf-8", "surrogatepass")
    return b"\n".join(lines)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every value inside a JSON value: what holds it, and its key there; those at the top first."""
    level = [value]
    while level:
        below = []
        for inside in level:
            keys = [*inside] if isinstance(inside, dict) else range(len(inside))
            for key in keys:
                yield inside, key
                if isinstance(inside[key], dict | list):
                    below.append(inside[key])
        level = below


# ---------------------------------------------------------------------------------- the run


def wrong(kind: Kind, folder: Path) -> str | None:
    """What the reader does that it must not, and where; None: it reads or refuses."""
    limit = MEMORY + 2 * (folder / kind.name).stat().st_size + _data()
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    faulthandler.dump_traceback_later(
        3 * SECONDS, exit=True, file=sys.__stderr__
    )  # it hangs outside of Python
    try:
        kind.read(folder)
        return None
    except QuantbenchError:  # of which a command prints one line
        return None
    except (Exception, TooLong) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT)]
        frame = [frame for frame in ours if "site-packages" not in frame.filename][-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return f"{type(error).__name__} at {where}: {error!s:.200}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)


def _data() -> int:
    """Bytes that RLIMIT_DATA counts: private memory that can be written to."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) << 10


@contextlib.contextmanager
def silence() -> Iterator[None]:
    nothing = io.StringIO()
    with contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        yield


def run(inputs: int, seed: int, only: str | None, top: Path) -> int:
    """The number of places in the code that do what they must not."""

    def too_long(*_: object) -> None:
        raise TooLong(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, too_long)
    every = {name: kind for name, kind in kinds(top).items() if only in (None, name)}
    for name, kind in every.items():
        with silence():
            kind.read(kind.folder)  # imports, pools and threads are no file's memory
        if fault := wrong(kind, kind.folder):
            raise SystemExit(f"{name}: the sound file is not read: {fault}")
    turns = [name for name, kind in every.items() for _ in range(kind.share)]
    draw, found, began = random.Random(seed), dict[str, Path](), time.monotonic()
    sound = {name: (kind.folder / kind.name).read_bytes() for name, kind in every.items()}
    for number in range(inputs):
        name = turns[number % len(turns)]
        kind = every[name]
        path = kind.folder / kind.name
        path.write_bytes(data := damaged(sound[name], draw))
        with silence():
            fault = wrong(kind, kind.folder)
        path.write_bytes(sound[name])
        place = fault and f"{name}: {fault.split(': ')[0]}"
        if place and place not in found:
            found[place] = top / f"found-{len(found)}-{kind.name}"
            found[place].write_bytes(data)
            print(f"input {number}, {name}: {fault}\n    {found[place]}", flush=True)
    seconds = time.monotonic() - began
    print(f"{inputs} damaged files in {seconds:.0f} s, seed {seed}: {len(found)} faults")
    return len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--only")
    options = parser.parse_args()
    top = Path(tempfile.mkdtemp(prefix="fuzz-"))
    os.chdir(top)
    os.environ["HF_HUB_OFFLINE"] = "1"
    child = os.fork()  # which may die
    if child == 0:
        found = run(options.inputs, options.seed, options.only, top)
        sys.stdout.flush()
        os._exit(bool(found))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, 1):
        print(f"a reader ended its process with {code}, seed {options.seed}; its file is in {top}")
    sys.exit(bool(code))


if __name__ == "__main__":
    main()
