"""What quantbench doctor finds: in the file, in words, and among them what is slow."""

import json
import re

import pytest

from quantbench import environment
from quantbench.ops.cpu import build
from quantbench.run import bandwidth
from tests.programs import worked


@pytest.fixture
def machine(monkeypatch):
    """One whose memory reads at once, whose kernels are built, and where nothing else runs."""
    monkeypatch.setattr(bandwidth, "BYTES", 1 << 20)
    monkeypatch.setattr("quantbench.commands.doctor.WATCHED", 0.01)
    monkeypatch.setattr("quantbench.run.machine.MOST_TAKEN", 2.0)
    monkeypatch.setattr(environment, "system_huge_pages", lambda: "madvise")
    monkeypatch.setattr("quantbench.host.cores", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("QUANTBENCH_ISA", raising=False)
    return monkeypatch


def shown(*words):
    return worked("doctor", *words).stdout


def test_the_file_holds_what_is_shown(machine, tmp_path):
    text = shown("--json", path := tmp_path / "doctor.json")
    value = json.loads(path.read_text())
    assert value["about"]["versions"]["torch"] in text and value["system"] in text
    assert value["threads"] == 2 and value["read_gb_per_s"] > 0 and value["cards"] == []
    assert re.search(rf"^read_gb_per_s +{value['read_gb_per_s']}$", text, re.M)
    assert (value["instruction_set"] is None) == bool(build.refusal())
    assert ("Nothing was found" in text) == (value["slow"] == [])


CAUSES = {  # variables and functions of the machine, and the sentence that follows
    "huge pages": ({"quantbench.environment.system_huge_pages": lambda: "never"},
        "weights are in pages of 4 KB: /sys/kernel/mm/transparent_hugepage/enabled is never"),
    "few threads": ({"OMP_NUM_THREADS": "1"}, "the environment leaves 1 of 2 cores"),
    "many threads": ({"OMP_NUM_THREADS": "3"}, "3 threads on 2 cores: slower than 2"),
    "no kernels": ({"quantbench.ops.cpu.build.refusal": lambda: "the compiler stopped"},
        "plain torch unpacks quantized weights at every step: the compiler stopped"),
    "no memory": ({"quantbench.host.free_memory": lambda: 1},
        "too little memory is free to measure its speed"),
    "others": ({"quantbench.run.machine.MOST_TAKEN": -1.0}, "in one second "),
    "no CUDA": ({"quantbench.commands.doctor.cards": lambda: ["A card"],
        "torch.cuda.is_available": lambda: False}, "torch cannot use the card"),
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_named(machine, cause):
    changes, sentence = CAUSES[cause]
    for name, value in changes.items():
        machine.setenv(name, value) if name.isupper() else machine.setattr(name, value)
    assert f"\n- {sentence}" in shown()
