"""quantbench estimate: its JSON, its tables, and a line for each bad input."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from quantbench.estimate.calibration import Power

from quantbench.__main__ import commands
from tests.estimate import invented

OPT = str(Path(__file__).parent / "opt-1.3b.json")
TINY = ("estimate", "--checkpoint_path", "dummy:TinyLlama-1.1B-Chat-v1.0")
KEYS = (
    *("prompt_seconds", "token_seconds", "tokens_per_second", "peak_memory_bytes"),
    "joules_per_token",
)


def run(*words):
    return CliRunner().invoke(commands, list(words))


@pytest.fixture
def machine(tmp_path):
    """A calibration of an invented machine, which is held to 65 W."""
    path = tmp_path / "machine.json"
    invented.calibration(power=Power(65.0, None, None, None)).save("--json", str(path))
    return str(path)


def test_the_json_of_a_calibrated_machine(tmp_path, machine):
    out = tmp_path / "out.json"
    result = run(*TINY, "--quantization", "int8wo", "--calibration", machine, "--json", str(out))
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    for key in KEYS:
        assert found[key]["value"] > 0 and found[key]["source"] and found[key]["bound"]
    assert found["token_seconds"]["low"] < found["token_seconds"]["high"]
    expected = invented.whole(invented_config(), "int8wo", 1, 1, 192)
    assert found["token_seconds"]["value"] == pytest.approx(expected, rel=0.02)
    assert "nine in ten" in result.stdout and "no counter" in result.stdout


def test_a_machine_whose_power_nothing_says(tmp_path):
    path, out = str(tmp_path / "machine.json"), tmp_path / "out.json"
    invented.calibration().save("--json", path)
    result = run(*TINY, "--calibration", path, "--json", str(out))
    assert result.exit_code == 0, result.output
    joules = json.loads(out.read_text())["joules_per_token"]
    assert joules["value"] is None
    assert joules["source"] == "no counter, and this device's power limit is not known"
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("energy"))
    assert joules["source"] in line and "J/token" not in line


def test_a_machine_that_is_not_calibrated(monkeypatch):
    monkeypatch.setattr("quantbench.compare.figures.estimating.of_this_machine", lambda kind: None)
    result = run(*TINY, "--device", "here")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.endswith(
        "--device here: this machine is not calibrated; quantbench calibrate measures it, in some "
        "minutes"
    )


def test_a_machine_whose_calibration_cannot_be_read(monkeypatch, tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text("{}")
    monkeypatch.setattr("quantbench.estimate.calibration_file.default_path", lambda: path)
    result = run(*TINY, "--device", "here")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert f"this machine's calibration, {path}: no calibration; `quantbench calibrate" in line


def invented_config():
    from quantbench.models.presets import preset

    return preset("TinyLlama-1.1B-Chat-v1.0")


def test_a_card_and_all_schemes(tmp_path):
    out = tmp_path / "out.json"
    result = run(*TINY, "--device", "L4", "--all_schemes", "--json", str(out))
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["device"] == "NVIDIA L4" and len(found["schemes"]) == 6
    assert "not measured" in result.stdout
    joules = found["schemes"]["none"]["joules_per_token"]
    assert joules["source"] == "no counter; power limit × time is an upper bound"


def test_what_fits(monkeypatch):
    monkeypatch.setattr("quantbench.compare.figures.estimate_options.SHOWN", ("none", "int8wo"))
    result = run(*TINY, "--what_fits", "24GB", "--device", "L4")
    assert result.exit_code == 0, result.output
    assert "Into 24.00 GB" in result.stdout and "2048 (all of its context)" in result.stdout


@pytest.mark.parametrize("table", [(), ("--all_schemes",), ("--what_fits", "24GB")], ids=str)
def test_a_calibration_of_another_machine_is_warned_of(tmp_path, machine, table, monkeypatch):
    """On every line, and in the JSON."""
    monkeypatch.setattr("quantbench.compare.figures.estimate_options.SHOWN", ("none", "int8wo"))
    out = tmp_path / "out.json"
    result = run(*TINY, "--calibration", machine, *table, "--json", str(out))
    assert result.exit_code == 0, result.output
    warnings = json.loads(out.read_text())["warnings"]
    assert warnings[0].startswith("calibrated with name Invented CPU, here ")
    assert any(warning.startswith("calibrated with torch 2.12.0, here ") for warning in warnings)
    mark = f"  ! {'; '.join(warnings)}"
    assert all(line.endswith(mark) for line in result.stdout.splitlines() if line)


BAD = [
    ((), "--checkpoint_path PATH", "nothing is given"),
    (("--device", "RTX A600"), "no datasheet; nearest: ", "quantbench calibrate"),
    (("--device", "L4", "--precision", "half"), "--precision takes bfloat16", "'half'"),
    (("--device", "L4", "--kv_cache", "int2"), "--kv_cache takes dense, int8", "'int2'"),
    (("--device", "L4", "--what_fits", "lots"), "takes a size such as 24GB", "'lots'"),
    (("--device", "L4", "--what_fits", "24"), "takes a size such as 24GB", "'24'"),
    (("--device", "L4", "--quantization", "int3"), "int3", "int4wo"),
    (("--calibration", "missing.json"), "--calibration missing.json", "No such file"),
    (("--device", "L4", "--batch_size", "4096"), "the run needs", "more than the 25.77 GB"),
    (("--device", "L4", "--tp", "3"), "--tp 3: TinyLlama-1.1B-Chat-v1.0 has 32", "--tp takes 1, 2"),
    (("--calibration", __file__), "--calibration ", "it is no JSON"),
    (("--device", "L4", "--sequence_length", "5000"), "need 5128 positions", "context has 2048"),
    (("--device", "L4", "--sequence_length", "9" * 9), "positions; the model's context", "fewer"),
    (("--device", "L4", "--context_depth", "9" * 15), "positions; the model's context", "fewer"),
    (
        ("--device", "L4", "--what_fits", "24GB", "--sequence_length", "9"),
        "--sequence_length",
        "all",
    ),
]


@pytest.mark.parametrize(("words", "first", "second"), BAD, ids=str)
def test_bad_input_is_one_line(words, first, second):
    result = run(*(TINY if words else ("estimate",)), *words)
    assert result.exit_code in (1, 2)
    message = str(result.exception) if not result.stderr else result.stderr
    assert first in message and second in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "unheard-of"}, "unheard-of"),
        ({"hidden_size": 64}, "it has no model_type"),
        ([1, 2], "it has no model_type"),
        ({"model_type": "llama"}, "it does not say its width (hidden_size), and transformers"),
        ({"model_type": "gpt2", "n_embd": 64}, "it does not say its number of layers"),
    ],
    ids=str,
)
def test_a_config_that_is_not_understood(tmp_path, fields, expected):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    result = run("estimate", "--checkpoint_path", str(tmp_path / "config.json"), "--device", "L4")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert expected in line


def test_the_text_model_of_one_with_pictures(tmp_path):
    """Every line says that it is not all of the model."""
    pytest.importorskip("transformers")
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "intermediate_size": 128, "vocab_size": 256}  # fmt: skip
    path, out = tmp_path / "config.json", tmp_path / "out.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    result = run("estimate", "--checkpoint_path", str(path), "--device", "L4", "--json", str(out))
    assert result.exit_code == 0, result.output
    note = "the text model of gemma3 alone: its other weights are not counted"
    assert all(line.endswith(f"  ! {note}") for line in result.stdout.splitlines() if line)
    found = json.loads(out.read_text())
    assert found["warnings"] == [note] and found["token_seconds"]["value"] > 0


def test_an_encoder_is_said_to_generate_nothing(tmp_path):
    pytest.importorskip("transformers")
    fields = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 128,
              "num_attention_heads": 2, "intermediate_size": 128, "max_position_embeddings": 512,
              "architectures": ["BertForMaskedLM"]}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    words = ("estimate", "--checkpoint_path", str(path), "--device", "L4")
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert "! BertForMaskedLM generates no text: counted as if it did" in result.stdout
    result = run(*words, "--num_layers", "1")
    assert "--num_layers cuts models of generate.py" in result.stderr
    result = run(*words, "--sequence_length", "600")
    assert "the model's context has 512: ask for fewer" in result.stderr


def test_an_architecture_that_transformers_knows():
    """OPT is none of ours: a card predicts it, this machine's calibration does not."""
    pytest.importorskip("transformers")
    result = run("estimate", "--checkpoint_path", OPT, "--device", "A6000")
    assert result.exit_code == 0, result.exception
    assert "memory's bandwidth" in result.stdout


def test_what_does_not_fit_of_transformers_is_not_told_to_ask_for_tables_of_schemes():
    pytest.importorskip("transformers")
    result = run("estimate", "--checkpoint_path", OPT, "--device", "L4", "--batch_size", "999")
    message = str(result.exception) if not result.stderr else result.stderr
    assert "more than the 25.77 GB that it has; take a smaller --batch_size" in message
    assert "--all_schemes" not in message
