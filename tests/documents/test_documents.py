"""quantbench readme: blocks of documents from committed data, and when they are stale."""

import json
import math
import re
from functools import partial
from pathlib import Path

import gguf
import pytest
import torch

from quantbench.documents.documents import rewritten
from quantbench.documents.tables import TABLES
from quantbench.errors import UsageError
from quantbench.kv_cache import CACHES
from quantbench.log.origin import git_commit
from quantbench.models.formats.gguf_blocks import PACKED
from quantbench.models.presets import preset
from quantbench.ops.cpu import linear
from quantbench.quality.thresholds import BROKEN, class_of
from quantbench.quantize.registry import SCHEMES
from quantbench.quantize.spec import parse_layer, parse_scheme
from quantbench.report.columns import size
from quantbench.run.sizes import kv_cache_bytes, size_of
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
    Path("docs/c.md").write_text("<!-- readme: kl_classes -->\n<!-- end -->\n")
    result = run("--check")
    assert result.exit_code == 1 and "stale" in result.stderr
    assert "+| 0.01 | not noticeable | Llama-3-8B as Q6_K has 0.0055" in result.stdout
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


# Tables that are written by hand, by their first heading: the tests below hold their figures.
HELD = ("`--kv_cache`", "`quant_method`, format", "type", "scheme | memory")


def test_no_other_table_with_figures_is_typed_by_hand():
    """Outside of the blocks that are written, no cell of a table is a number alone; but in the log,
    each of whose entries has its command."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if path.name == "LOG.md":
            continue
        blocks = r"<!-- readme: .*?<!-- end -->|<!-- trust -->.*?<!-- end of trust -->"
        text = re.sub(blocks, "", path.read_text(), flags=re.S)
        for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
            cells = re.findall(r"(?<=\|)\s*≤?[\d.,]+ ?(?:%|ms|s|GB|MB|tok/s|×)?\s*(?=\|)", table)
            assert table.startswith(tuple(f"| {head} |" for head in HELD)) or not cells, path.name


def table_of(page, heading):
    """The cells of the table with this first heading, without its heads."""
    text = (ROOT / "docs" / page).read_text()
    (table,) = re.findall(rf"^\| {re.escape(heading)} \|.*\n(?:\|.*\n)+", text, re.M)
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]
    return rows[2:]


def test_the_bytes_of_caches():
    config = preset("Llama-3.1-8B")
    for name, _, each, every in table_of("caches.md", "`--kv_cache`"):
        of = [kv_cache_bytes(config, 1, positions, torch.bfloat16, CACHES[name.strip("`")])
              for positions in (131072, 1)]  # fmt: skip
        assert (each, every) == (f"{of[0] / 131072 / 32:.0f}", size(of[0]))
    assert [row[0].strip("`") for row in table_of("caches.md", "`--kv_cache`")] == list(CACHES)


def bits_here(form):
    """Bits per weight of a large matrix in the order in which the C++ kernels read it."""
    spec = parse_layer(f"stored-{form}")
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    packed = SCHEMES[type(spec)].quantize(weight, spec)
    return 8 * linear.pack(packed.parts, 4096).numel() / weight.numel()


def test_bits_of_gguf_types():
    types = {name: (in_file, here) for name, in_file, here in table_of("formats.md", "type")}
    assert list(types) == list(PACKED)
    for name, (in_file, here) in types.items():
        values, bytes_ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert in_file == f"{8 * bytes_ / values:.4g}"
        assert here == f"{bits_here(str(PACKED[name].form).removeprefix('stored-')):.4g}"


FORMS = [  # that kernels read, of the rows of the table of methods
    "int-4-128-float16-none", "uint-4-128-float16-uint8", "uint-4-128-float16-uint8",
    "int-4-128-bfloat16-none", "int-8-0-bfloat16-none", "fp8-8-0-bfloat16-none",
    "fp8-8-128-float32-none", "fp4-4-16-e4m3-none", "fp4-4-32-e8m0-none", "fp4-4-32-e8m0-none",
    "nf4-4-64-float32-none", "int-8-0-float32-none", "fp8-8-0-float32-none",
    "int-4-128-bfloat16-bfloat16",
]  # fmt: skip


def test_bits_of_the_methods_of_folders():
    rows = table_of("formats.md", "`quant_method`, format")
    for (method, *_, here), form in zip(rows, FORMS, strict=True):
        assert here == f"{bits_here(form):.3g}", method


def test_what_fits_is_counted_from_shapes():
    """choose.md: of the schemes whose quality was measured, those that none beats in memory and
    quality; a memory of 50 GB/s, and a cache of 4096 positions."""
    model, cpu = preset("Meta-Llama-3-8B"), torch.device("cpu")
    cache = kv_cache_bytes(model, 1, 4096, torch.bfloat16, CACHES["dense"])
    measured = json.loads((ROOT / "docs" / "data" / "quality_tiny.json").read_text())["rows"]
    found = []
    for row in measured:
        if row["kl"] is not None and class_of(row["kl"]) != BROKEN:
            needs = size_of(model, parse_scheme(row["scheme"]), cpu, torch.bfloat16, "reference")
            found.append((needs.memory_bytes, row["kl"], needs.model_bytes, row["scheme"]))
    rows, best = [], math.inf
    for memory, kl, read_by_a_step, scheme in sorted(found):
        if kl < best:
            best = kl
            speed = f"{50e9 / read_by_a_step:.1f}"
            rows.insert(0, [f"`{scheme}`", size(memory + cache), speed, class_of(kl)])
    assert table_of("choose.md", "scheme | memory") == rows


def test_what_the_demo_printed_is_in_the_readme():
    """docs/terminal.svg is drawn from the same file (make screenshots)."""
    demo = (ROOT / "docs" / "data" / "demo.txt").read_text()
    assert f"```\n{demo.strip()}\n```" in (ROOT / "README.md").read_text()


def test_a_document_runs_no_other_code(tmp_path, monkeypatch):
    """Not even quantbench's, but for the modules that the documentation is of."""
    (tmp_path / "evilmodule.py").write_text("open('ran', 'w').close()\nX = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for kind in ("fields", "api"):
        for word in ("evilmodule:X", "os:system", "quantbench.cli:key", "antigravity:x", ":"):
            with pytest.raises(UsageError, match="is of no module of quantbench.compare"):
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
    block = f"<!-- readme: speeds {word} about.json -->\n<!-- end -->\n"
    with pytest.raises(UsageError, match="is not in the document's folder"):
        rewritten("R.md", block, TABLES)


def test_what_is_written_stays_in_its_block():
    fences = "````\n```\n<!-- end -->\n<script>alert()</script>\n````\n"
    evil = {"x": lambda words: f"{fences}<b>\n<!-- end -->\n<sub>kept</sub>"}
    once = rewritten("R.md", "<!-- readme: x -->\n<!-- end -->\nbehind\n", evil)
    assert rewritten("R.md", once, evil) == once and once.count("\n<!-- end -->") == 1
    inner = fences.replace("\n<!--", "\n <!--") + "&lt;b>\n&lt;!-- end -->\n<sub>kept</sub>\n"
    assert once == f"<!-- readme: x -->\n\n{inner}\n<!-- end -->\nbehind\n"
