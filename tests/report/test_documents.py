"""quantbench readme: blocks of documents from committed data, and when they are stale."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from quantbench.errors import UsageError
from quantbench.log.about import git_commit
from quantbench.report.doc_tables import TABLES
from quantbench.report.documents import rewritten
from tests.programs import ROOT, command, worked

ABOUT = {
    "command": "quantbench ab",
    "date": "2026-11-22",
    "commit": "0123456789",
    "machine": "2 cores of X",
    "versions": {"torch": "2.13.0"},
}
HEAD = (git_commit() or "").partition("-")[0]
CAPTION = "<sub>2 cores of X, torch 2.13.0; 2026-11-22, commit 0123456: `quantbench ab`</sub>"
run = partial(command, "readme")


def save(name, **fields):
    Path(name).write_text(json.dumps({"about": ABOUT, **fields}))


def test_the_documents_are_what_their_data_give(monkeypatch):
    """Every table with its committed figures, options, commands, the API and keys of JSON: what
    changes how one is written shows here."""
    monkeypatch.chdir(ROOT)
    worked("readme", "--check")


def test_only_what_lies_between_the_markers_changes():
    text = "# a\n\n<!-- readme: x f g -->\nold\n<!-- end -->\nb\n<!-- readme: x -->\n<!-- end -->\n"
    given = []

    def block(words):
        given.append(list(words))
        return "| new |"

    new = rewritten("R.md", text, {"x": block})
    assert given == [["f", "g"], []] and "old" not in new
    assert new.startswith("# a\n\n<!-- readme: x f g -->\n\n| new |\n\n<!-- end -->\nb\n")
    assert rewritten("R.md", new, {"x": block}) == new


def test_check_tells_what_is_stale(in_tmp):
    Path("docs").mkdir()
    Path("docs/c.md").write_text("<!-- readme: cache_bytes -->\n<!-- end -->\n")
    result = run("--check")
    assert result.exit_code == 1 and "stale" in result.stderr
    assert "+| `int4` | a scale for every 32 of head_dim | 1152 | 4.83 GB |" in result.stdout
    assert run().stdout == "Rewrote docs/c.md\n"
    assert run("--check").exit_code == 0 and run().stdout == ""


@pytest.mark.parametrize(
    "commit, code, said",
    [
        (HEAD, 0, ""),
        ("0123456789", 0, "note: a.json is of commit 0123456, which git does not know\n"),
        (f"{HEAD}-dirty", 1, f"error: a.json is of commit {HEAD[:7]} with changes; commit them, "
         "and run its command again\n"),
    ],
    ids=["known", "unknown", "changed"],
)  # fmt: skip
def test_check_doubts_figures_of_no_commit(in_tmp, commit, code, said):
    Path("D.md").write_text("<!-- readme: about a.json -->\n<!-- end -->\n")
    Path("a.json").write_text(json.dumps({"about": ABOUT | {"commit": commit}}))
    run("D.md")
    result = run("--check", "D.md")
    assert (result.exit_code, result.stderr) == (code, said)


def test_what_a_document_asks_for_in_vain(in_tmp):
    save("ab.json", rows=[{"arm": "none", "verdict": "baseline", "tok_s": 14.0},
                          {"arm": "int8wo, kv_cache=int8", "verdict": "faster", "tok_s": 25.0},
                          {"arm": "fp6", "failed": "no kernel"}])  # fmt: skip
    with pytest.raises(UsageError, match="ab.json measured no arm fp6; it has none, int8wo,_kv"):
        TABLES["speeds"](["ab.json", "fp6"])


def test_speed_ups_of_prompts_stand_beside_each_other_by_their_length(in_tmp):
    """Files of earlier versions have the length in the facts of an arm alone."""

    def arm(name, ratio, **more):
        return {"arm": name, "verdict": "faster", "tok_s": 2.0, "prompt_speed_up": ratio, **more}

    facts = [{"facts": {"prompt_tokens": 17}}, {"facts": None}]
    save("ab.json", rows=[arm("int8wo", [1.56, 1.4, 1.7]), arm("fp6", [1.2])], arms=facts)
    save("long.json", rows=[arm("int8wo", [0.87, 0.8, 0.9], prompt_tokens=512)], arms=[{}])
    lines = TABLES["speeds"](["ab.json", "long.json"]).splitlines()
    assert "| prompt of 17 tokens × | prompt of 512 tokens × |" in lines[0]
    assert "| 1.56 (1.40 to 1.70) | 0.87 (0.80 to 0.90) |" in lines[2]
    assert "| 1.20 | - |" in lines[3]
    assert [line for line in lines if "<sub>" in line] == [
        CAPTION,
        f"prompt of 512 tokens ×: {CAPTION}",
    ]
    alone = TABLES["speeds"](["ab.json", "int8wo"])
    assert "prompt of 17 tokens ×" in alone and "512" not in alone


def test_no_table_with_figures_is_typed_by_hand():
    """Outside of the blocks that are written, no cell of a table is a number alone; but in the log,
    each of whose entries has its command."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if path.name == "LOG.md":
            continue
        text = re.sub(r"<!-- readme: .*?<!-- end -->", "", path.read_text(), flags=re.S)
        cells = re.findall(r"(?<=\|)\s*≤?[\d.,]+ ?(?:%|ms|s|GB|MB|tok/s|×)?\s*(?=\|)", text)
        assert cells == [], path.name


def test_a_document_runs_no_other_code(tmp_path, monkeypatch):
    """Not even quantbench's, but for the modules that the documentation is of."""
    (tmp_path / "evilmodule.py").write_text("open('ran', 'w').close()\nX = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for kind in ("fields", "api"):
        for word in ("evilmodule:X", "os:system", "quantbench.cli:key", "antigravity:x", ":"):
            with pytest.raises(UsageError, match="is of no module of quantbench.answer"):
                rewritten("R.md", f"<!-- readme: {kind} {word} -->\n<!-- end -->\n", TABLES)
    assert not Path("ran").exists()


@pytest.mark.parametrize("way", ["absolute", "above", "link"])
def test_a_document_shows_files_of_its_folder_alone(tmp_path, monkeypatch, way):
    folder = tmp_path / "docs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (tmp_path / "secret").write_text("secret")
    save("about.json")
    Path("link").symlink_to(tmp_path / "secret")
    word = {"absolute": str(tmp_path / "secret"), "above": "../secret", "link": "link"}[way]
    block = f"<!-- readme: printed {word} about.json -->\n<!-- end -->\n"
    with pytest.raises(UsageError, match="does not lie in the document's folder"):
        rewritten("R.md", block, TABLES)


def test_what_is_printed_stays_in_its_block(in_tmp):
    save("about.json", command="x")
    evil = "a\n```\n<!-- end -->\n<script>alert()</script>\n````\n<!-- readme: x -->\n"
    Path("text").write_text(evil)
    block = "<!-- readme: printed text about.json -->\n<!-- end -->\nbehind\n"
    once = rewritten("R.md", block, TABLES)
    assert rewritten("R.md", once, TABLES) == once and once.endswith("\n<!-- end -->\nbehind\n")
    assert once.count("\n<!-- end -->") == 1 and once.count("\n`````\n") == 2
    evil = {"x": lambda words: "<b>\n<!-- end -->\n<sub>kept</sub>"}
    once = rewritten("R.md", "<!-- readme: x -->\n<!-- end -->\n", evil)
    inner = "\n\n&lt;b>\n&lt;!-- end -->\n<sub>kept</sub>\n"
    assert once == f"<!-- readme: x -->{inner}\n<!-- end -->\n"
