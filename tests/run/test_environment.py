"""One environment for every command: the processes themselves say what is in force in them."""

import gc
import json
import os
import re
import time
from contextlib import closing

import pytest
import torch

from quantbench.bench.process import Process
from quantbench.environment import huge_page_bytes, system_huge_pages, without_collections
from quantbench.generate import Generator
from quantbench.log.log import read as read_log
from tests.models.small import small_checkpoint, small_model
from tests.programs import finished

OPTIONS = ["--num_samples", "1", "--max_new_tokens", "2", "--device", "cpu"]
UNSET = ("THP_MEM_ALLOC_ENABLE", "KMP_BLOCKTIME", "TORCH_WARM_POOL", "OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def as_in_a_new_shell(monkeypatch):
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def generated(tmp_path):
    """Runs generate.py in a separate process; its facts, its log's line and its output."""

    def run(*options, **variables):
        json_path, log_path = tmp_path / "runs.jsonl", tmp_path / "log.txt"
        outputs = ["--output_json_path", json_path, "--write_result", log_path]
        words = ["generate.py", *OPTIONS, *options, *outputs]
        done = finished(*words, env={**os.environ, **variables})
        facts = json.loads(json_path.read_text().splitlines()[-1])
        return facts, read_log(str(log_path)).records[-1][1], done.stderr

    return run


def of_a_worker(*options):
    with closing(Process()) as worker:
        worker.ask("load", argv=[*OPTIONS, *options])
        return worker.ask("get_ready")


def same(facts):
    """What is in force, except the number of huge pages, which varies."""
    return {k: v for k, v in facts["environment"].items() if k != "huge_page_bytes"}


def test_generate_and_the_workers_of_compare_run_under_the_same(generated):
    facts, record, _ = generated("--compile")
    assert facts["environment"]["variables"]["THP_MEM_ALLOC_ENABLE"] == "1"
    assert "TORCH_WARM_POOL" not in facts["environment"]["variables"]  # cpu-step compiles nothing
    assert facts["environment"]["gc_threshold"] == 100_000
    assert facts["environment"]["threads"] == facts["device"]["threads"]
    assert same(of_a_worker("--compile")) == same(facts)
    assert "--threads" not in record.repro


def test_what_the_user_has_set_stays(generated):
    """And OpenMP's own limit of threads counts."""
    given = {"THP_MEM_ALLOC_ENABLE": "0", "KMP_BLOCKTIME": "0", "CXXFLAGS": ""}
    facts, _, _ = generated(**given, OMP_THREAD_LIMIT="1")
    assert given.items() <= facts["environment"]["variables"].items()
    assert "HOME" not in facts["environment"]["variables"]
    assert facts["environment"]["threads"] == 1


def test_threads_are_set_recorded_and_repeated_and_workers_take_the_option(generated, tmp_path):
    """The run is profiled: the profiler prints nothing, and each phase is printed once."""
    trace = tmp_path / "trace.json"
    facts, record, said = generated("--threads", "1", "--profile", trace)
    assert "profiler_start" not in said and "USDT" not in said and trace.stat().st_size > 1000
    for phase in ("Loading", "Warming up"):
        assert len(re.findall(f"^{phase}", said, re.MULTILINE)) == 1, said
    assert facts["environment"]["threads"] == facts["device"]["threads"] == 1
    assert "--threads 1" in record.repro and "slower" not in said
    assert facts["config"]["threads"] == 1
    assert same(of_a_worker("--threads", "1")) == same(facts)
    many = (os.cpu_count() or 1) + 1  # what no machine sets: the line has to name it
    facts, record, said = generated(OMP_NUM_THREADS=str(many))
    assert facts["environment"]["threads"] == many and f"{many} threads on" in said
    assert f"--threads {many}" in record.repro


@pytest.mark.skipif(system_huge_pages() in (None, "never"), reason="no transparent huge pages here")
def test_a_loaded_model_lies_in_huge_pages(generated, tmp_path):
    """One layer of TinyLlama, 88 MB, with an embedding and an output of 2 MB each."""
    wide = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 1}
    model = ["--checkpoint_path", small_checkpoint(tmp_path, vocab_size=512, **wide)]
    facts, _, _ = generated(*model)
    assert facts["environment"]["huge_page_bytes"] > facts["weight_bytes"] / 2
    if system_huge_pages() == "madvise":
        facts, _, _ = generated(*model, THP_MEM_ALLOC_ENABLE="0")
        assert facts["environment"]["huge_page_bytes"] < facts["weight_bytes"] / 2


def test_files_of_the_kernel(kernel_files):
    kernel_files({})
    assert system_huge_pages() is huge_page_bytes() is None
    kernel_files(
        {
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "proc/self/smaps_rollup": "Rss: 5 kB\nAnonHugePages:      2048 kB",
        }
    )
    assert (system_huge_pages(), huge_page_bytes()) == ("madvise", 2 << 20)


def test_no_garbage_is_collected_while_a_sample_is_timed(monkeypatch):
    generator, before = Generator(small_model(), cache_size=16), gc.get_threshold()
    timed, collected = [False], []

    def clock(perf_counter=time.perf_counter):
        timed[0] = len(read) % 3 != 2  # of three readings the last ends the sample
        read.append(0)
        return perf_counter()

    def collector(phase, _):
        collected.append(timed[0])

    read = []
    gc.callbacks.append(collector)
    monkeypatch.setattr("time.perf_counter", clock)
    gc.set_threshold(10)  # a collection after every tenth object
    try:
        for _ in range(3):
            generator.generate(torch.tensor([[1, 2, 3]]), 5)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collector)
    assert len(read) == 9 and collected and not any(collected)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled):
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError), without_collections():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
