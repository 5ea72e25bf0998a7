"""quantbench estimate: its JSON, its tables, and a line for each bad input."""

import itertools
import json
import shlex
from pathlib import Path

import pytest
import torch

from quantbench.bench.arm import make_arms
from quantbench.estimate.here import Here
from quantbench.estimate.predict import Phase
from quantbench.log.options import parse
from tests.models.small import small_checkpoint
from tests.programs import OLD_LOG, command, json_of, worked
from tests.refusals import one_line

TINY = ("estimate", "--checkpoint_path", "dummy:TinyLlama-1.1B-Chat-v1.0")
KEYS = (
    *("prompt_seconds", "token_seconds", "tokens_per_second", "peak_memory_bytes"),
    "joules_per_token",
)


def refused(*words):
    return one_line(command(*words))


@pytest.fixture
def machine(monkeypatch):
    """This machine, on which prompts take 0.5 s and steps 20 ms; held to 65 W, with 2 GB free."""
    prompt, step = (Phase({"layers": s}, "layers", "measured now", 0.05) for s in (0.5, 0.02))
    monkeypatch.setattr(Here, "_measure", lambda self, request: (prompt, step))
    monkeypatch.setattr("quantbench.run.energy.power_limit", lambda: 65.0)
    monkeypatch.setattr("quantbench.devices.resolve", lambda name: torch.device("cpu"))
    monkeypatch.setattr("quantbench.devices.free_memory", lambda device: 2 * 10**9)


def verified_schemes(stdout):
    """The schemes of the arms that the last line compares; each is an arm that ab takes."""
    words = shlex.split(stdout.splitlines()[-1].removeprefix("verify: quantbench ab "))
    texts = [text for word, text in itertools.pairwise(words) if word == "--arm"]
    common = parse(words[: words.index("--arm")])
    return [arm.config.quantization for arm in make_arms(common, texts)]


def test_the_json_of_this_machine(tmp_path, machine, monkeypatch):
    """Each figure names its source: measured, or an upper bound; or why there is none."""
    words = (tmp_path / "out.json", *TINY, "--quantization", "int8wo")
    value, result = json_of(*words)
    for key in KEYS:
        assert value[key]["value"] > 0 and value[key]["source"] and value[key]["bound"]
    token = value["token_seconds"]
    assert token["low"] < token["value"] == 0.02 < token["high"]
    assert token["source"] == "measured now" and value["about"]["command"]
    assert "nine in ten" in result.stdout and "no counter" in result.stdout
    assert result.stdout.splitlines()[-1] == f"verify: {value['verify']}"
    monkeypatch.setattr("quantbench.run.energy.power_limit", lambda: None)
    value, result = json_of(*words)
    joules = value["joules_per_token"]
    assert joules["value"] is None
    assert joules["source"] == "no counter, and this device's power limit is not known"
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("energy"))
    assert joules["source"] in line and "J/token" not in line


def test_what_does_not_fit_here_is_not_measured(machine):
    """TinyLlama takes 2.2 GB in bfloat16, and 1.2 in int8wo."""
    assert "more than the 2.00 GB that it has; --all_schemes and --what_fits" in refused(*TINY)
    result = worked(*TINY, "--all_schemes")
    assert "schemes is measured, in 10 to 30 seconds each" in result.stderr
    rows = {line.split()[0]: line for line in result.stdout.splitlines()[2:]}
    assert "more than the 2.00 GB" in rows["none"] and "20 ms" in rows["int8wo"]
    assert "none" not in verified_schemes(result.stdout)


def test_a_card_and_all_schemes(tmp_path):
    value, result = json_of(tmp_path / "out.json", *TINY, "--device", "L4", "--all_schemes")
    assert value["device"] == "NVIDIA L4" and len(value["schemes"]) == 6
    assert verified_schemes(result.stdout) == list(value["schemes"])
    assert result.stdout.splitlines()[-1] == f"verify: {value['verify']}"
    assert "not measured" in result.stdout
    joules = value["schemes"]["none"]["joules_per_token"]
    assert joules["source"] == "no counter; power limit × time is an upper bound"


def test_a_described_model_with_or_without_dummy(tmp_path):
    """As generate.py takes it, and the config.json alone."""
    dummy = small_checkpoint(tmp_path)
    for path in (dummy.removeprefix("dummy:"), dummy):
        words = ("--checkpoint_path", path, "--device", "L4")
        result = worked("estimate", *words, "--new_tokens", "8", "--sequence_length", "16")
        verify = result.stdout.splitlines()[-1]
        assert f"--checkpoint_path {dummy} --device cuda --compile" in verify


def test_a_card_by_the_runs_of_a_log(tmp_path):
    """An A100 reached 1131 GB/s with int8wo: 55 % of its data sheet's bandwidth."""
    words = ("--quantization", "int8wo", "--calibration", OLD_LOG)
    result = worked(*TINY, "--device", "A100", *words)
    assert f"2 runs of {OLD_LOG}, taken to have run on NVIDIA A100-SXM4-80GB" in result.stdout
    other = worked(*TINY, "--device", "H100", "--calibrated_on", "A100", *words)
    assert "on NVIDIA A100-SXM4-80GB" in other.stdout


def test_what_fits(monkeypatch):
    """The largest first, and a count of what does not fit: 0.7 GB hold 4 bits of 1.1 billion
    weights beside 131 MB of embedding, and no 8."""
    schemes = ("int4wo-128", "none", "int8wo", "uintx-2-64", "bnb-nf4")
    monkeypatch.setattr("quantbench.estimate.options.SHOWN", schemes)
    result = worked(*TINY, "--what_fits", "720MB", "--device", "L4")
    head, columns, first, second, notes = result.stdout.splitlines()
    assert "Into 720.00 MB, 1 sequence at once" in head
    assert columns.split() == ["scheme", "weights", "dense", "int8", "fp8", "int4"]
    assert first.split()[0] == "int4wo-128" and second.split()[::5] == ["uintx-2-64", "all"]
    assert notes == "all: the model's context, 2048; 3 schemes more: too large"
    result = command(*TINY, "--what_fits", "50MB", "--device", "L4")
    assert "Nothing fits into 50.00 MB; `generate --dry_run` shows" in result.stdout


def test_the_text_model_of_one_with_pictures(tmp_path):
    """Every line says that it is not all of the model."""
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "intermediate_size": 128, "vocab_size": 256}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    words = ("estimate", "--checkpoint_path", path, "--device", "L4")
    value, result = json_of(tmp_path / "out.json", *words)
    note = "the text model of gemma3 alone: its other weights are not counted"
    assert all(line.endswith(f"  ! {note}") for line in result.stdout.splitlines() if line)
    assert value["warnings"] == [note] and value["token_seconds"]["value"] > 0


def test_an_encoder_is_said_to_generate_nothing(tmp_path):
    fields = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 128,
              "num_attention_heads": 2, "intermediate_size": 128, "max_position_embeddings": 512,
              "architectures": ["BertForMaskedLM"]}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    words = ("estimate", "--checkpoint_path", path, "--device", "L4")
    assert "! BertForMaskedLM generates no text: counted as if it did" in worked(*words).stdout
    assert "--num_layers cuts models of generate.py" in refused(*words, "--num_layers", "1")
    message = refused(*words, "--sequence_length", "600")
    assert "the model's context has 512: ask for fewer" in message


def test_an_architecture_that_transformers_knows():
    """OPT is none of ours."""
    path = Path(__file__).with_name("opt-1.3b.json")
    result = worked("estimate", "--checkpoint_path", path, "--device", "A6000")
    assert "memory's bandwidth" in result.stdout
