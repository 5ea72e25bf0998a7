"""The log under parallel writers, kills and full disks; and `quantbench log check`."""

import dataclasses
import errno
import itertools
import json
import multiprocessing
import os
import random
import resource
import tempfile
import time
from pathlib import Path

import pytest

from quantbench.errors import LogError
from quantbench.log import log
from quantbench.log.config import RunConfig, repro
from quantbench.log.log import config_of
from quantbench.log.log import read as read_log
from quantbench.log.record import Record
from tests.models.refused import refusal
from tests.programs import OLD_LOG, python

RECORD = Record.parse(OLD_LOG.read_text().splitlines()[2])
LINE = dataclasses.replace(RECORD, repro=repro(RunConfig(device="cpu", compile=True))).render()

FORK = multiprocessing.get_context("fork")


def line(who, count, words=1):
    """A whole record, whose prompt says who wrote it."""
    prompt = f"{who} {count} " + "word " * words
    return dataclasses.replace(RECORD, repro=repro(RunConfig(prompt=prompt))).render()


def check(path):
    return python("-m", "quantbench", "log", "check", path)


def written_by(path):
    """(writer, count) of every record, in the order of the file."""
    prompts = (config_of(record).prompt.split() for _, record in read_log(path).records)
    return [(words[0], int(words[1])) for words in prompts]


@pytest.mark.parametrize("several", ["a\nb", "a\rb", "a\n"])
def test_more_than_one_line_is_refused(tmp_path, several):
    with pytest.raises(LogError):
        log.append(tmp_path / "log", several)
    assert not (tmp_path / "log").exists()


def append_200(path, who):
    for count in range(200):
        log.append(path, line(who, count))


def test_eight_processes_of_200_lines_each_lose_none(tmp_path):
    path = tmp_path / "log"
    writers = [FORK.Process(target=append_200, args=(path, who)) for who in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 8
    assert path.read_bytes().count(b"\n") == 1600
    assert read_log(path).bad == []
    assert sorted(written_by(path)) == sorted((str(w), c) for w in range(8) for c in range(200))


def append_on(path, who, reports):
    """Lines of 200 kB, for a kill to land inside a write; each is reported once it is written."""
    whole = line(who, "COUNT", 40_000)
    for count in itertools.count():
        log.append(path, whole.replace("COUNT", str(count)))
        os.write(reports, f"{count}\n".encode())


def test_killed_writers_leave_no_torn_line(tmp_path):
    """Every line reported as written is there, whatever came after it."""
    chance = random.Random(7)
    for attempt in range(10):
        path, writers, reports = tmp_path / f"log{attempt}", [], []
        for who in range(2):
            reading, writing = os.pipe()
            reports.append(open(reading))
            writers.append(FORK.Process(target=append_on, args=(path, who, writing)))
            writers[who].start()
            os.close(writing)
        reported = {(str(who), int(counts.readline())) for who, counts in enumerate(reports)}
        time.sleep(chance.random() * 0.02)
        for who, writer in enumerate(writers):
            writer.kill()
            writer.join()
            reported |= {(str(who), int(count)) for count in reports[who].read().split()}
            reports[who].close()
        log.append(path, LINE)
        lines = path.read_text().splitlines()
        assert lines.pop() == LINE
        assert all(len(line) > 200_000 and line.endswith("word '") for line in lines)
        prompts = [line.partition(" --prompt '")[2].split() for line in lines]
        found = [(words[0], int(words[1])) for words in prompts]
        assert reported <= set(found) and len(set(found)) == len(found)


def test_every_place_to_be_cut_at_leaves_whole_records(tmp_path):
    path = tmp_path / "log"
    # After "--temperature 0" the rest could have been left out by whoever wrote the line.
    ambiguous = LINE.index("--temperature 0") + len("--temperature 0")
    for cut in range(1, len(LINE)):
        path.write_text(f"heading\n{LINE}\n{LINE[:cut]}")
        torn = read_log(path)
        log.append(path, LINE)
        lines = path.read_text().split("\n")
        if cut < ambiguous:
            assert lines == ["heading", LINE, LINE, ""]
            assert len(torn.records) == 1
            assert cut < 15 or "cut short, and removed by the next run" in torn.bad[0][1]
        else:
            assert lines == ["heading", LINE, LINE[:cut], LINE, ""]
        assert read_log(path).bad == []


@pytest.mark.parametrize(
    "tail, kept",
    [
        ("llama 2", "llama 2\n"),
        (LINE, f"{LINE}\n"),
        (OLD_LOG.read_text().splitlines()[-1], OLD_LOG.read_text().splitlines()[-1] + "\n"),
        ("what tok/s= means", "what tok/s= means\n"),
        ("", ""),
        (f"{LINE} --prompt '{'a' * 200_000}", ""),  # longer than one block
    ],
    ids=range(6),
)
def test_a_last_line_without_newline(tmp_path, tail, kept):
    path = tmp_path / "log"
    path.write_text(f"above\n{tail}")
    log.append(path, LINE)
    assert path.read_text() == f"above\n{kept}{LINE}\n"


def append_at_most(path, room):
    """What two writers say of a file that has room for `room` bytes more."""
    limit = os.path.getsize(path) + room
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    json_line = {"a": "b" * 400}
    return [
        refusal(LogError, append, path, value)
        for append, value in ((log.append, line("limited", 1)), (log.append_json, json_line))
    ]


@pytest.mark.parametrize("room", [0, 1, 40, 300])
@pytest.mark.parametrize("before", ["", f"llama 2\n{LINE}\n", "llama 2"])
def test_a_file_size_limit_leaves_the_log_as_it_was(tmp_path, room, before):
    path = tmp_path / "log"
    path.write_text(before)
    with FORK.Pool(1) as child:
        said = child.apply(append_at_most, (path, room))
    assert said == [f"cannot append to {str(path)!r}: File too large"] * 2
    assert path.read_text() == before


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_failed_fsync_or_ctrl_c_takes_the_line_back(tmp_path, monkeypatch, error):
    path = tmp_path / "log"
    path.write_text("llama 2\n")

    def failing(descriptor):
        raise error

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(LogError if isinstance(error, OSError) else KeyboardInterrupt):
        log.append(path, LINE)
    assert path.read_text() == "llama 2\n"


def test_json_lines(tmp_path):
    path = tmp_path / "samples.jsonl"
    values = [{"a": [1.5, "é\n\u2028"]}, {"b": None}]
    for value in values:
        log.append_json(path, value)
    assert [json.loads(line) for line in path.read_text().splitlines()] == values
    whole = path.read_text()
    path.write_text(whole + whole[:9])  # cut short
    log.append_json(path, {"c": 1})
    assert path.read_text() == whole + '{"c": 1}\n'
    path.write_text(whole.rstrip("\n"))
    log.append_json(path, {"c": 1})
    assert path.read_text() == whole + '{"c": 1}\n'
    path.write_text("not of ours")
    log.append_json(path, {"c": 1})
    assert path.read_text() == 'not of ours\n{"c": 1}\n'
    with pytest.raises(LogError, match="not JSON compliant"):
        log.append_json(path, {"c": float("nan")})


def test_the_writable_check_accepts_without_touching(tmp_path):
    path = tmp_path / "log"
    log.check_writable(path)
    assert not path.exists()
    path.write_text("llama 2")
    os.utime(path, (1, 1))
    log.check_writable(path)
    assert path.read_text() == "llama 2" and path.stat().st_mtime == 1
    (tmp_path / "link").symlink_to(tmp_path / "target")
    log.check_writable(tmp_path / "link")
    log.append(tmp_path / "link", LINE)
    assert (tmp_path / "target").read_text() == f"{LINE}\n"


def test_unwritable_logs_are_one_line_each_before_and_at_the_append(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing" / "log")
    unwritable = {
        str(tmp_path / "folder"): "Is a directory",
        str(tmp_path / "missing" / "log"): f"there is no folder {str(tmp_path / 'missing')!r}",
        str(tmp_path / "nowhere"): f"there is no folder {str(tmp_path / 'missing')!r}",
        str(tmp_path / "file" / "log"): "Not a directory",
        str(tmp_path / "new") + "/": "Is a directory",
        str(tmp_path / "pipe"): "not a regular file",
        str(tmp_path / ("x" * 300)): "File name too long",
        "/dev/full": "not a regular file",
        "": "no such file",
    }
    for path, reason in unwritable.items():
        for act in (log.check_writable, lambda path: log.append(path, LINE)):
            assert refusal(LogError, act, path) == f"cannot append to {path!r}: {reason}"


NOBODY = 65534


def become_nobody():
    """Lose root's privileges, who may write everywhere."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def reason(path):
    try:
        log.check_writable(path)
    except LogError as error:
        return str(error).rpartition(": ")[2]


def test_permissions_are_seen():
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are root's alone
        folder = Path(name)
        for file in ("writable", "locked"):
            (folder / file).touch()
        for inner in ("open", "closed"):
            (folder / inner).mkdir()
        modes = {".": 0o755, "writable": 0o666, "locked": 0o444, "open": 0o777, "closed": 0o555}
        for path, mode in modes.items():
            (folder / path).chmod(mode)
        paths = [folder / path for path in ("writable", "locked", "open/new", "closed/new")]
        with FORK.Pool(1, become_nobody) as child:
            reasons = child.map(reason, paths)
    assert reasons == [None, "Permission denied", None, "Permission denied"]


def test_reading_tells_records_headings_and_bad_lines_apart(tmp_path):
    path = tmp_path / "log"
    foreign = f"{LINE} --sparsity semi"
    path.write_bytes(
        f"README\n\n{LINE}\n20240831225155, of another kind\nx{LINE}\n2024 was a year\n"
        f"{foreign}\n".encode()
        + b"caf\xe9\n"
        + LINE.encode()
    )
    reading = read_log(path)
    assert [number for number, _ in reading.records] == [3, 7, 9]
    assert [number for number, _ in reading.bad] == [4, 5, 7]
    assert "did you mean" in reading.bad[2][1] or "no such option" in reading.bad[2][1]


def test_names_that_are_not_utf8_go_through_the_file(tmp_path):
    path = tmp_path / "log"
    record = dataclasses.replace(Record.parse(LINE), mod=os.fsdecode(b"caf\xe9"))
    log.append(path, record.render())
    assert b"mod: caf\xe9, kv_quant" in path.read_bytes()
    assert read_log(path).records == [(1, record)]


def test_check_of_the_reference_log():
    result = check(OLD_LOG)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        "29 records, all intact; 10 repro commands lacked a space, which was inserted\n"
    )


def test_a_log_that_went_through_an_editor_of_windows(tmp_path):
    """With other line ends, and a mark of the byte order in front of the first record."""
    lines = [line for line in OLD_LOG.read_bytes().splitlines(True) if line.startswith(b"20")]
    path = tmp_path / "log"
    path.write_bytes(b"".join(lines))
    records = read_log(path).records
    path.write_bytes(b"\xef\xbb\xbf" + b"".join(lines).replace(b"\n", b"\r\n"))
    again = read_log(path)
    assert again.records == records and len(records) == 29 and not again.bad


def test_check_names_every_bad_line(tmp_path):
    path = tmp_path / "log"
    path.write_text(f"llama 2\n{LINE}\n\n{LINE.replace('tok/s=', 'tok/s= ')}\n{LINE[:60]}\n")
    result = check(path)
    assert result.returncode == 1
    one, two, last = result.stdout.splitlines()
    assert one.startswith(f"{path}:4: column 23: ") and two.startswith(f"{path}:5: column 60: ")
    assert last == "2 records, 2 damaged lines"


@pytest.mark.parametrize("fails", ["write", "fsync"])
@pytest.mark.parametrize("before", [None, "", f"{LINE}\n", f"{LINE}\n{LINE[:40]}", "a heading"])
def test_a_full_disk_leaves_the_bytes_that_were_there(tmp_path, monkeypatch, before, fails):
    """Also a line that was cut short, which the next one replaces; and no new empty file."""
    path = tmp_path / "log.txt"
    if before is not None:
        path.write_text(before)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, full)
        with pytest.raises(LogError, match="No space left on device"):
            log.append(path, LINE)
    assert (path.read_text() if path.exists() else None) == before
    log.append(path, LINE)
    whole = (before or "").removesuffix(LINE[:40])
    assert path.read_text() == whole + "\n" * (whole == "a heading") + f"{LINE}\n"
