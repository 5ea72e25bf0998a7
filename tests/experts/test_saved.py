"""Experts that --save has left beside a mixture are read from there; and what happens to a file
that is not what was saved."""

import ctypes
import json
import mmap
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from quantbench.log.config import RunConfig
from quantbench.models.formats.saved import SavedTensors
from quantbench.run import loading
from quantbench.run.plan import make_plan
from tests.experts.small import NEEDS_KERNELS, disk_full, logits, when_held
from tests.models.small import small_checkpoint
from tests.programs import command, finished, worked
from tests.refusals import one_line

SHORT = ("--num_samples", "1", "--max_new_tokens", "4", "--device", "cpu", "--threads", "1")
ROOM = ("--expert_memory", "12", "--expert_policy", "cache", "--write_result", "none")
TINY = (*SHORT, "--checkpoint_path", "tiny_moe", "--quantization", "int8wo")
FILE = Path("saved", "experts.safetensors")
MANIFEST = Path("saved", "quantbench.json")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def save(*words, start=worked):
    return start("generate", *TINY, *words, "--write_result", "none")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """tiny_moe as int8wo, saved with its experts' file, and the text that it wrote meanwhile."""
    folder = tmp_path_factory.mktemp("original") / "saved"
    result = save(*ROOM, "--save", str(folder))
    assert f"({folder}, " in result.stderr.replace("; ", "(")
    return folder, result.stdout.split("\n\n")[0]


@pytest.fixture
def saved(original, place):
    """A copy of it, of the same dates."""
    shutil.copytree(original[0], place / "saved")


def run(*words, start=worked):
    return start("generate", *SHORT, "--checkpoint_path", "saved", *ROOM, *words)


def written(place):
    """Whether a run has written experts for itself: the folder of its file stays."""
    return (place / "cache" / "quantbench" / "experts").exists()


def model_of(**options):
    plan = make_plan(RunConfig(device="cpu", **options))
    return loading.load(plan, lambda *a: None, lambda line: None).model


def logits_of(**options):
    return logits(model_of(**options), 2, decoder="auto")


def test_a_run_reads_it_and_writes_none(original, saved, place, monkeypatch):
    """The shards' experts are not read, but for the two that are compared with the file, and the
    shards' pages are dropped from the page cache."""
    read, names, advise, dropped = SavedTensors.read, [], os.posix_fadvise, set()

    def noted_read(self, name, like, cut=None):
        names.append(name)
        return read(self, name, like, cut)

    def noted_advice(file, start, length, advice):
        if advice == os.POSIX_FADV_DONTNEED and (start, length) == (0, 0):
            dropped.add(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        return advise(file, start, length, advice)

    monkeypatch.setattr(SavedTensors, "read", noted_read)
    monkeypatch.setattr(os, "posix_fadvise", noted_advice)
    before = {path.name: path.read_bytes() for path in (place / "saved").iterdir()}
    assert json.loads(before[MANIFEST.name])["experts"] is True
    with safe_open(FILE, "pt") as opened:
        assert set(opened.keys()) == {f"layers.{i}.experts.{e}" for i in range(5) for e in range(8)}
    result = run("--output_json_path", "runs.jsonl")
    assert result.stdout.split("\n\n")[0] == original[1]
    record = json.loads(Path("runs.jsonl").read_text())
    assert record["experts"]["slow_place"].startswith(str(place / FILE))
    assert {path.name: path.read_bytes() for path in (place / "saved").iterdir()} == before
    experts = {name.partition(".w")[0] for name in names if ".experts." in name}
    assert experts == {f"layers.{i}.feed_forward.experts.{e}" for i, e in ((0, 0), (4, 7))}
    assert any(name.startswith("layers.3.attention.wo.") for name in names)
    assert dropped == {"quantized-00001.safetensors"} and not written(place)


@pytest.mark.parametrize(
    ("scheme", "policy"),
    [("none", "fetch"), ("int8wo", "compute_there"), ("int4wo-32", "fetch"),
     ("fp6", "compute_there")],
)  # fmt: skip
def test_logits_are_the_same_to_the_bit(scheme, policy, place):
    how = {"checkpoint_path": "tiny_moe", "quantization": scheme}
    two = {"expert_memory": "9", "expert_policy": policy}
    expected = logits_of(**how)
    assert torch.equal(logits_of(**how, **two, save="saved"), expected)
    assert torch.equal(logits_of(checkpoint_path="saved", **two), expected)
    assert torch.equal(logits_of(checkpoint_path="saved"), expected)  # all in one memory
    fewer = {"checkpoint_path": "saved", "num_layers": 3}
    assert torch.equal(logits_of(**fewer, **two), logits_of(**fewer))
    assert not written(place)


# ---------------------------------------------------------------------------------- other files


def a_folder(_):
    FILE.unlink()
    FILE.mkdir()


def two_experts_exchanged(_):
    """Same shapes, other numbers, as in another model."""
    data = bytearray(FILE.read_bytes())
    each = len(data) // 40 // 4096 * 4096  # the header is shorter than an expert
    start = len(data) - 40 * each
    one, two = slice(start, start + each), slice(start + each, start + 2 * each)
    data[one], data[two] = data[two], data[one]
    FILE.write_bytes(data)


def reading_fails(patch):
    def fails(*arguments):
        raise OSError(5, "Input/output error")

    patch.setattr(os, "pread", fails)


def saved_without_them(_):
    shutil.rmtree("saved")
    assert save("--save", "saved") and not FILE.exists()


DAMAGE = [
    (lambda _: os.truncate(FILE, 100_000), "experts.safetensors was truncated: 100000 of "),
    (lambda _: FILE.unlink(), "experts.safetensors: No such file or directory"),
    (lambda _: FILE.write_text("Once"), "experts.safetensors has another form than this run's ke"),
    (a_folder, "experts.safetensors: Is a directory"),
    (two_experts_exchanged, "experts.safetensors has another form than this run's kernels read"),
    (reading_fails, "experts.safetensors: Input/output error"),
    (saved_without_them, "saved holds no file of them"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_a_damaged_file_is_a_line_and_the_run_writes_its_own(
    damage, reason, original, saved, place, monkeypatch
):
    damage(monkeypatch)
    before = {path.name: path.stat().st_size for path in Path("saved").iterdir()}
    result = run()
    (line,) = [line for line in result.stderr.splitlines() if reason in line]
    assert f": experts are written into {place}/cache/quantbench/experts until the run" in line
    assert "--save with --expert_memory writes them once" in line
    assert result.stdout.split("\n\n")[0] == original[1] and written(place)
    assert {path.name: path.stat().st_size for path in Path("saved").iterdir()} == before


@NEEDS_KERNELS
def test_another_kernel_and_a_folder_that_is_named_write_their_own(saved, place):
    result = run("--kernel", "reference")
    assert "has another form than this run's kernels read: experts are written" in result.stderr
    assert written(place)
    assert "(slow, " in run("--expert_folder", "slow").stderr.replace("; ", "(")


def test_a_file_that_is_truncated_in_the_middle_of_a_run(saved, monkeypatch):
    when_held(monkeypatch, lambda slow: os.truncate(FILE, 4096))
    Path("log.txt").write_text("")
    result = run("--write_result", "log.txt", start=command)
    assert "experts.safetensors: the experts' file was truncated while the" in one_line(result)
    assert result.exit_code == 1 and Path("log.txt").read_text() == ""


@pytest.mark.parametrize(
    ("where", "works"), [("pwrite", 20), ("posix_fallocate", 0), ("fsync", 0), ("open", 0)]
)
def test_a_disk_that_is_full_while_experts_are_saved(where, works, monkeypatch):
    """Whatever fails first, and however often it has worked before: nothing is left."""
    disk_full(monkeypatch, where, works, FILE.name)
    result = save(*ROOM, "--save", "saved", start=command)
    line = "--save saved: the experts' file cannot be written: No space"
    assert one_line(result).startswith(line)
    assert result.exit_code == 1 and not Path("saved").exists()


# ---------------------------------------------------------------------------------- memory


# A mixture that is hardly anything but its experts: 8 layers of 16, of 0.6 MB each in int8.
MIXTURE = {"model_type": "mixtral", "hidden_size": 384, "intermediate_size": 512,
           "num_hidden_layers": 8, "num_local_experts": 16, "num_experts_per_tok": 2}  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_loading_holds_no_more_than_the_rest_and_the_fast_experts(place):
    """The resident set's rise while loading, from the saved file, is far below the experts' bytes.

    Bound: half of them. What belongs there is about 10 MB: attention, the embedding, 4 slots, the
    two experts that are compared, and what malloc does not give back.
    """
    for name, changes in (("large", MIXTURE), ("small", MIXTURE | {"num_hidden_layers": 1})):
        path = small_checkpoint(place, f"{name}.json", **changes)
        save(*ROOM, "--checkpoint_path", path, "--save", name)
    environment = {**os.environ}
    environment.pop("XDG_CACHE_HOME")  # it has the C++ kernels
    words = ("tests.run.loading_peak", place / "small", place / "large", "two_tiers:none")
    done = finished("-m", *words, env=environment)
    experts = 8 * 16 * 3 * 384 * 512
    assert (place / "large" / FILE.name).stat().st_size > experts
    assert json.loads(done.stdout.splitlines()[-1])["peak"] < experts / 2


def in_page_cache(path):
    """The share of a file's pages that the system holds in its page cache, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    size = path.stat().st_size
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE)
    held = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(mapping))
    assert libc.mincore(address, size, held) == 0
    return sum(page & 1 for page in held) / len(held)


def test_no_expert_is_left_in_the_page_cache(saved):
    """Neither by loading, nor by measuring what experts cost in place. A tenth: what the system may
    still be reading ahead."""
    os.sync()  # pages that are not written yet cannot be dropped
    with open(FILE, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if in_page_cache(FILE) > 0.1:
        pytest.skip("this file system keeps its files in memory")
    model_of(checkpoint_path="saved", expert_memory="12")  # whose policy is auto
    shards = [in_page_cache(shard) for shard in Path("saved").glob("quantized-*")]
    assert shards and max(in_page_cache(FILE), *shards) < 0.1
