"""SmolLM2-135M-Instruct and Gemma 3 270M as PyPI has them: GGUF files of other people.

The oracle is transformers, which reads the files with the gguf package, as floats.
"""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import transformers

from quantbench import files, models
from quantbench.generate import Generator
from quantbench.log.config import split
from quantbench.models.formats import open_checkpoint
from quantbench.models.loading import load_model
from quantbench.quantize.spec import parse
from tests.programs import python, worked

FILE = files.cache_folder() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA_3 = FILE.with_name("gemma-3-270m.Q4_K_M.gguf")
PROMPT = "The capital of France is"

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not (FILE.exists() and GEMMA_3.exists()), reason="no real model: `make models` fetches it"
    ),
]


@pytest.fixture(scope="module")
def theirs():
    read = transformers.AutoModelForCausalLM.from_pretrained
    return read(FILE.parent, gguf_file=FILE.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokens():
    checkpoint = open_checkpoint(str(FILE))
    tokenizer = checkpoint.tokenizer(checkpoint.config().vocab_size)
    return torch.tensor([tokenizer.encode(PROMPT)])


@torch.no_grad()
def test_logits_are_those_of_transformers(theirs, tokens):
    expected = theirs(tokens).logits
    floats = load_model(str(FILE), precision=torch.float32)
    found = Generator(floats, 1, 64).forward(tokens, 0)
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)
    as_is = models.load(str(FILE), precision=torch.float32)
    found = Generator(as_is, 1, 64).forward(tokens, 0)
    assert torch.allclose(found, expected, atol=1e-3, rtol=1e-3)


MEASURE = """
import resource, sys
from quantbench import models
models.load("tiny", quantization="int8wo")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
models.load(sys.argv[1])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_loading_takes_little_more_memory_than_the_file_has():
    done = python("-c", MEASURE, FILE, check=True)
    assert int(done.stdout) < 1.1 * FILE.stat().st_size


@torch.no_grad()
def test_60_greedy_tokens_are_those_of_transformers(theirs, tokens):
    model = models.load(str(FILE), precision=torch.float32)
    found = Generator(model, 1, 128).generate(tokens, 60).tokens
    best = theirs(torch.cat((tokens, found), 1)).logits.argmax(-1)  # after each prefix
    assert torch.equal(found, best[:, -61:-1])


GREEDY = ("--checkpoint_path", FILE, "--temperature", "0")
ONCE = ("--num_samples", "1", "--write_result", "none")


def test_it_answers_and_is_logged_by_its_file_s_mix(tmp_path):
    log = tmp_path / "log.txt"
    given = ["generate", *GREEDY, "--prompt", PROMPT, "--max_new_tokens", "4"]
    given += ["--num_samples", "1", "--write_result", log]
    done = worked(*given, "--save", tmp_path / "saved")
    assert f"{PROMPT} Paris" in done.stdout
    again = worked(*given, "--checkpoint_path", tmp_path / "saved")
    assert f"{PROMPT} Paris" in again.stdout
    first, second = log.read_text().splitlines()
    assert " quant: gguf-Q4_1, mod: SmolLM2-135M-Instruct.Q4_1, " in first
    assert " quant: gguf-Q4_1, mod: saved, " in second
    assert "--quantization as-is" in first


def test_a_text_that_ends_at_once_is_explained():
    asked = ("--prompt", "What is the capital of France?", "--max_new_tokens", "4")
    done = worked("generate", *GREEDY, *ONCE, *asked)
    assert "--interactive" in done.stderr


def test_chat_ends_where_the_model_ends():
    asked = "What is the capital of France? Answer with one word.\n"
    result = worked("generate", "--interactive", *GREEDY, input=asked)
    assert "Paris" in result.stdout
    assert "<|im_end|>" not in result.stdout and len(result.stdout) < 500


@pytest.mark.slow
def test_from_the_file_to_a_recommendation_that_runs(tmp_path):
    """Of four layers, to be short: the whole model answers in the tests above."""
    measured = ["--schemes", "as-is,int8wo", "--max_minutes", "0.4", "--tokens", "64"]
    measured += ["--num_layers", "4"]
    measured += ["--processes", "1", "--half_width", "90%", "--max_new_tokens", "4"]
    measured += ["--output", tmp_path / "out", "--write_result", "none"]
    done = worked("recommend", "--checkpoint_path", FILE, *measured)
    (use,) = re.findall(r"^Use (\S+):", done.stdout, re.M)
    assert parse(use)
    words = split(re.search(rf"^.*generate.*--quantization {use}.*$", done.stdout, re.M)[0])
    again = worked(*map(os.path.expanduser, words[words.index("generate") :]), *ONCE)
    assert re.search(rf"^{use if use != 'as-is' else 'gguf-Q4_1'} ", again.stdout, re.M)


# By transformers 5.24, from the same file; its tokenizer takes half a minute.
GEMMA_3_IDS = json.loads((Path(__file__).parent / "data" / "gemma3_ids.json").read_text())
GEMMA_3_ANSWER = [506, 5279, 529, 506, 2891, 529, 7001, 236761]
GEMMA_3_ANSWER += [1030, 563, 506, 7488, 3207, 528, 7001, 532]


def test_gemma_3_reads_texts_as_transformers():
    checkpoint = open_checkpoint(str(GEMMA_3))
    tokenizer = checkpoint.tokenizer(checkpoint.config().vocab_size)
    for text, ids in GEMMA_3_IDS.items():
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text.replace("▁", " ")
    assert tokenizer.bos_id == 2 and tokenizer.eos_ids == {1}
    assert tokenizer.special["<end_of_turn>"] == 106


def test_gemma_3_answers_as_transformers():
    model = load_model(str(GEMMA_3), precision=torch.float32)
    prompt = torch.tensor([GEMMA_3_IDS[PROMPT]])
    found = Generator(model, 1, 32).generate(prompt, len(GEMMA_3_ANSWER)).tokens
    assert found.tolist() == [GEMMA_3_ANSWER]
