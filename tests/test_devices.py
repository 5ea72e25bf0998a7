"""What is free: the kernel's files, as they look in a container and outside, and the drivers'."""

import gc
import resource
import sys
from types import SimpleNamespace

import pytest
import torch

from quantbench import devices
from quantbench.errors import UsageError
from quantbench.run.facts import Measured, Sample, WarmUp
from quantbench.run.run_table import table
from tests.bench.facts import FACTS

GB = 10**9
CPU = torch.device("cpu")
CACHE = "sys/devices/system/cpu/cpu0/cache"
TOTAL = "MemTotal:  32000000 kB\n"
MEMINFO = {"proc/meminfo": f"{TOTAL}MemFree:  1000000 kB\nMemAvailable:  20000000 kB\n"}
STATISTICS = "anon 1000000000\nactive_file 1500000000\ninactive_file 500000000\nslab 9\n"
OLD_STATISTICS = "active_file 7\ninactive_file 7\ntotal_active_file {0}\ntotal_inactive_file {0}\n"


def group(*texts):
    """A control group's limit, use and statistics."""
    paths = (f"sys/fs/cgroup/memory.{name}" for name in ("max", "current", "stat"))
    return dict(zip(paths, texts, strict=False))


def old_group(limit, used):
    """The same of version 1, with files of 2 GB."""
    texts = {"limit_in_bytes": limit, "usage_in_bytes": used, "stat": OLD_STATISTICS.format(GB)}
    return {f"sys/fs/cgroup/memory/memory.{name}": text for name, text in texts.items()}


@pytest.mark.parametrize(
    ("given", "free"),
    [
        ({}, None),
        (MEMINFO, 20_480_000_000),
        ({"proc/meminfo": TOTAL}, None),
        (MEMINFO | group("max", "5", STATISTICS), 20_480_000_000),
        # 8 GB, 3 of them used, 2 of these for files
        (MEMINFO | group(8 * GB, 3 * GB, STATISTICS), 7 * GB),
        (MEMINFO | group(64 * GB, 3 * GB, STATISTICS), 20_480_000_000),
        (group(8 * GB, 3 * GB, STATISTICS), 7 * GB),
        (group(8 * GB, 3 * GB, "anon 5"), 5 * GB),
        (group(3 * GB, 6 * GB, STATISTICS), 0),
        (MEMINFO | group(8 * GB), 20_480_000_000),
        (MEMINFO | old_group(8 * GB, 3 * GB), 7 * GB),
        (MEMINFO | old_group(2**63 - 4096, 3 * GB), 20_480_000_000),
    ],
)
def test_free_memory_of_the_cpu(kernel_files, given, free):
    kernel_files(given)
    assert devices.free_memory(CPU) == free


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "xpu"])
def test_free_memory_of_a_card_is_the_driver_s_and_what_torch_holds_unused(name, monkeypatch):
    asked = []
    module = SimpleNamespace(
        mem_get_info=lambda device: asked.append(device) or (10 * GB, 24 * GB),
        memory_reserved=lambda device: 5 * GB,
        memory_allocated=lambda device: 2 * GB,
    )
    monkeypatch.setattr(torch, name.split(":")[0], module)
    assert devices.free_memory(torch.device(name)) == 13 * GB
    assert asked == [torch.device(name)]


def test_free_memory_of_mps(monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 20 * GB, raising=False)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 5 * GB, raising=False)
    assert devices.free_memory(torch.device("mps")) == 15 * GB


def test_the_peak_is_that_since_the_reset():
    """512 MB that come and go before the reset do not count after it. (The kernel's counter of
    resident pages may lag by 256 pages per processor of the machine.)"""
    if not devices.can_reset_peak():
        pytest.skip("reads /proc/self/clear_refs, which cannot be written to here")
    torch.ones(512 << 20, dtype=torch.int8)
    (before,) = devices.peak_memory(CPU).values()
    devices.reset_peak_memory(CPU)
    after = devices.peak_memory(CPU)
    assert set(after) == {"resident"} and after["resident"] < before - (256 << 20)


def test_a_peak_that_cannot_be_reset_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "CLEAR_REFERENCES", tmp_path / "no" / "clear_refs")
    devices.reset_peak_memory(CPU)
    peak = devices.peak_memory(CPU)
    assert list(peak) == ["resident_since_start"] and peak["resident_since_start"] > 10**7
    samples = [Sample(1.0, 1.0, 1.0, 1.0, 1.0)]
    for kinds, at_most in ((peak, True), ({"resident": 1}, False)):
        peaks = {"generate": kinds}
        run = Measured(FACTS, WarmUp(None, [1.0], True), None, peaks, samples)
        assert ("≤ " in table(run)) == at_most


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_temporaries_are_reused_while_memory_is_returned():
    """A temporary of 1 MB has 256 pages; a hundred of them in a row need not fault in each anew.
    What is larger goes back to the system at once."""

    def page_faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    with devices.returning_memory():
        torch.ones(1 << 18)  # now the heap has room for it
        before = page_faults()
        for _ in range(100):
            torch.ones(1 << 18)
        assert page_faults() - before < 100 * 256 / 4
        gc.collect()
        growth = []
        for _ in range(3):  # what earlier tests left may be freed in between
            torch.ones(64 << 20, dtype=torch.int8)
            devices.reset_peak_memory(CPU)
            (after,) = devices.peak_memory(CPU).values()
            large = torch.ones(64 << 20, dtype=torch.int8)
            devices.reset_peak_memory(CPU)
            (with_it,) = devices.peak_memory(CPU).values()
            growth.append(with_it - after)
            del large
    if devices.can_reset_peak():
        assert max(growth) > 60 << 20


@pytest.mark.parametrize(
    ("sizes", "largest"),
    [(("48K", "2M", "32768K", "unknown"), 32 << 20), (("48K", "1G"), 1 << 30), ((), None)],
)
def test_the_last_level_cache_is_the_largest(kernel_files, sizes, largest):
    assert (devices.last_level_cache(CPU) or 1) > 0  # of this machine
    kernel_files({f"{CACHE}/index{number}/size": size for number, size in enumerate(sizes)})
    assert devices.last_level_cache(CPU) == largest


def test_a_card_of_a_number_that_is_not_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.resolve("cuda:1").index == 1
    with pytest.raises(UsageError, match="cuda:7: the highest number here is 1; use auto, cpu, cu"):
        devices.resolve("cuda:7")
