"""A card's efficiency from runs: of an invented card, and of the A100 of the reference log."""

import dataclasses
import json
import statistics

import pytest

from quantbench.errors import QuantbenchError
from quantbench.estimate.calibration import runs
from quantbench.estimate.cards import A5000, card
from quantbench.estimate.predict import Request, predict
from quantbench.log.record import Record
from quantbench.models.presets import preset
from tests.programs import OLD_LOG

COMMAND = (
    "python generate.py --quantization int8wo --checkpoint_path dummy:TinyLlama-1.1B-Chat-v1.0 "
    "--device cuda --precision torch.bfloat16 --compile --num_samples 5 --max_new_tokens 100 "
    "--top_k 200 --temperature 0.8 --prefill_size 512"
)


def test_lines_of_llama_2_predict_those_of_llama_3(tmp_path):
    """Five schemes on an A100; autoquant is none whose layers are known. That fp6 reached 585 GB/s
    on one model and 910 on the other is 35 % of it; the others are within 1 %."""
    lines = [line for line in OLD_LOG.read_text().splitlines() if "compile: True" in line]
    log = tmp_path / "log.txt"
    log.write_text("".join(f"{line}\n" for line in lines if "Llama-2-7b" in line))
    machine = card("A100", runs(str(log), "A100"))
    errors = {}
    for record in map(Record.parse, (line for line in lines if "Meta-Llama-3-8B" in line)):
        scheme = record.quant.replace("None", "none")
        if scheme.startswith("autoquant"):
            continue
        request = Request(preset(record.mod), scheme, prompt=6, new_tokens=200,
                          precision=record.dtype.removeprefix("torch."))  # fmt: skip
        errors[scheme] = predict(request, machine).tokens_per_second.value / record.tok_s - 1
    assert len(errors) == 5
    assert statistics.fmean(map(abs, errors.values())) <= 0.08
    assert max(abs(error) for scheme, error in errors.items() if scheme != "fp6") < 0.015


@pytest.mark.parametrize("kind", ["generate", "ab"])
def test_shares_are_found_again_in_results(tmp_path, kind):
    """The card reaches 30 % of the L4's peak and 55 % of its bandwidth."""
    made = dataclasses.replace(A5000, arithmetic=0.30, memory=0.55)
    request = Request(preset("TinyLlama-1.1B-Chat-v1.0"), "int8wo", prompt=512, new_tokens=100)
    l4 = card("L4")
    prompt, token = (l4.phase(request, count, made) for count in l4.counts(request))
    row = {"model": "TinyLlama-1.1B-Chat-v1.0", "time_to_first_token_s": prompt.seconds,
           "decode_tok_s": 1 / token.seconds}  # fmt: skip
    if kind == "ab":
        content = {"about": {"machine": "NVIDIA L4"}, "rows": [row | {"command": COMMAND}]}
    else:
        old = next(line for line in OLD_LOG.read_text().splitlines() if "quant: int8wo" in line)
        line = dataclasses.replace(Record.parse(old), repro=COMMAND).render()
        content = row | {"line": line, "device": {"name": "NVIDIA L4"}}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(content))
    found = card("L4", runs(str(path), "H100 SXM")).efficiency(request)  # the file names the card
    assert (found.arithmetic, found.memory) == pytest.approx((0.30, 0.55), rel=1e-3)
    assert found.source.startswith("as in 1 run of ")


def test_runs_of_an_a5000_for_an_a6000(tmp_path):
    """A step goes by the bandwidth, which is the same; a prompt by the power limits, 300 W for 230
    (the streaming multiprocessors: 84 for 64). Runs of the same model stand alone."""
    rows = [
        {"model": model, "device": "NVIDIA RTX A5000", "kind": kind, "batch": batch,
         "positions": 1024, "measured_seconds": seconds}
        for model, kind, batch, seconds in (
            ("TinyLlama-1.1B-Chat-v1.0", "prompt", 16, 0.55),
            ("TinyLlama-1.1B-Chat-v1.0", "token", 1, 0.0034),
            ("Llama-3.2-1B", "token", 1, 1),
        )
    ]  # fmt: skip
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    measured = runs(str(tmp_path / "rows.json"), "L4")
    request, own = measured[0].request, card("A5000", measured)
    prompt, token = (own.phases(run.request)[i] for i, run in enumerate(measured[:2]))
    assert (prompt.seconds, token.seconds) == pytest.approx((0.55, 0.0034), rel=0.01)
    other = card("A6000", measured)
    assert other.phases(measured[1].request)[1].seconds == pytest.approx(token.seconds, rel=1e-3)
    linear = prompt.parts["linear"] / other.phases(request)[0].parts["linear"]
    assert linear == pytest.approx(300 / 230, rel=0.05)
    assert other.phases(request)[0].deviation > prompt.deviation
    assert "power limits" in other.efficiency(request).source


def test_lines_of_a_faster_card_are_refused():
    """1419 GB/s, on a card that has 300."""
    with pytest.raises(QuantbenchError, match="another card; name it as --calibrated_on"):
        card("L4", runs(str(OLD_LOG), "L4")).efficiency(Request(preset("Llama-2-7b-hf")))


def test_a_damaged_line_is_left_out_and_told(tmp_path, capsys):
    """The first line, and a half of the second."""
    path = tmp_path / "log.txt"
    path.write_text("\n".join(OLD_LOG.read_text().splitlines()[2:4])[:700])
    assert len(runs(str(path), "A100")) == 1
    assert "left out: 1 damaged line" in capsys.readouterr().err
