"""The house's rule of construction: a file imports only from floors below its own.

FLOORS puts every module and folder of the top level on a floor, the lowest first. ROOMS does the
same with what is inside each folder; there a folder's name stands for all of its files that are not
named themselves. A folder's `__init__` is above its files, and its `__main__` above that.
"""

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "ops" / "cpu" / "src"
FLOORS = (
    {"errors"},
    {"text", "typed_json"},
    {"files", "helptext"},
    {"cli"},
    {"devices", "ops"},
    {"kv_cache"},
    {"quantize", "models", "benchlog"},
    {"experts"},
    {"run"},
    {"estimate"},
    {"generate"},
    {"compare"},
    {"quantbench", "setup"},
)
ROOMS = {
    "ops": (
        {"cpu.compiler"},
        {"names", "packing", "cpu.build", "triton.values"},
        {"formats", "kv"},
        {"cpu", "triton", "reference", "hqq"},
        {"attention", "ranks"},
        {"prefill_attention"},
    ),
    "kv_cache": ({"base"}, {"dense", "eight_bit", "int4"}),
    "quantize": (
        {"spec", "activation", "sparsity"},
        {"kernel", "packed"},
        {"across", "cpu"},
        {"kernels", "scheme"},
        {"schemes", "pruning"},
        {"registry"},
        {"autoquant", "torchao_config"},
    ),
    "models": (
        {"accepted"},
        {"mixture", "compression"},
        {"config", "tokenizer", "checkpoints.names"},
        {"presets", "split"},
        {"*", "chat"},  # *: whatever is not named, an architecture each
        {"mixtral"},  # its layers are those of llama
        {"registry"},
        {"hugging_face"},
        {"meta_params"},
        {"checkpoints"},
        {"tiny"},
        {"tiny_moe"},
    ),
    "benchlog": (
        {"shell", "origin", "table"},
        {"kinds", "about"},
        {"config"},
        {"record"},
        {"log"},
    ),
    "experts": (
        {"aio", "guessing", "layout", "popularity", "stopwatch", "traffic"},
        {"kept", "placement", "plan", "routing", "skew", "slow"},
        {"copies"},
        {"store"},
        {"layer"},
        {"fused"},
        {"tiers"},
        {"costs", "fused_costs", "watch"},
        {"rehearsal"},
    ),
    "run": (
        {"energy", "launch", "machine", "threads"},
        {"caches", "checks", "cutting", "environment", "parallel", "trust"},
        {"bandwidth", "compiling", "decoding", "plan", "scoring", "tracing"},
        {"generation"},
        {"calibration", "chat", "facts", "saved_experts", "sizes"},
        {"tiers", "why"},
        {"identity", "loading"},
        {"measure", "saved_model"},
    ),
    "estimate": (
        {
            "calibration_models",
            "datasheets",
            "blocks",
            "headings",
            "recording",
        },
        {"calibration", "counting", "own_results", "tables"},
        {"counting_configs", "findings", "plausible"},
        {"audit_energy", "calibration_file"},
        {"audit", "drift"},
        {"curves", "exchanges", "exchanging", "memory", "probe"},
        {"layers"},
        {"alone", "passes", "published"},
        {"machine", "validate"},
        {"power", "predict"},
        {"as_published", "beside", "fits"},
    ),
    "compare": (
        {
            "arguments",
            "countdown",
            "steps",
            "subcommands",
            "figures.contrasts",
            "figures.latency",
            "figures.recorded_times",
            "output.lines",
            "peers.work",
        },
        {"figures.families", "figures.one_way", "figures.recorded_runs"},
        {
            "figures.block_errors",
            "figures.late_steps",
            "figures.option_tests",
            "figures.order",
            "figures.plan",
            "figures.recorded_plans",
        },
        {"figures.interval", "sampling.answers"},
        {"figures.row", "figures.choices", "figures.json_rows", "figures.recorded"},
        {"limit_options", "output.points", "figures.recorded_answer"},
        {
            "fidelity",
            "figures.recommendation",
            "figures.why",
            "output.bars",
            "output.pareto",
            "sampling.clock",
            "sampling.file_pages",
            "sampling.layer_timing",
        },
        {"sampling.arm", "sampling.nursery", "sampling.ranks"},
        {"sampling.results", "sampling.process", "sampling.worker", "sampling.latency_plan"},
        {"sampling.latency_results"},
        {"figures.readings", "figures.timings"},
        {"figures.rows", "peers", "sampling.progress", "sampling.schedule", "sampling.workers"},
        {"output"},
        {"sampling"},
        {"figures"},
        {"output.narrative", "latency_sweeps"},
        {"commands.ab"},
        {"commands"},
    ),
    "quantbench": ({"completion"},),
}
# Imports by name, which no reader of import statements sees: file → why it may.
LATE = {
    "quantize/registry.py": "finds the files of quantize/schemes, so that none lists them",
    "compare/sampling/nursery.py": "imports what workers need, and forks to become their command",
    "compare/__main__.py": "imports the command that was asked for, and not the others",
    "quantize/__main__.py": "is quantbench schemes",
    "kv_cache/__main__.py": "is quantbench caches",
    "models/registry.py": "imports the one architecture that is in use",
    "kv_cache/__init__.py": "imports the kind of cache that is in use",
    "models/__init__.py": "models.load is a door to run/loading.py, which stands above the models",
}
# Those of them that import a file from above: (file, what its strings name).
UPWARDS = {
    ("models", "quantbench.run.loading"),
    ("quantbench.quantize.__main__", "quantbench.compare.__main__"),
    ("quantbench.kv_cache.__main__", "quantbench.compare.__main__"),
}
LATE_IMPORTS = {"import_module", "__import__", "run_module", "run_path", "resolve_name"}

OUTSIDE = {"build", "demo", "docs", "tests"}


def tree(*suffixes: str) -> list[Path]:
    """The files of the tree, relative to its root, without tests, documents and what is hidden."""
    paths = []
    for folder, below, files in os.walk(ROOT):
        below[:] = [n for n in below if n[0] != "." and n not in OUTSIDE and "egg-info" not in n]
        paths += [Path(folder, file).relative_to(ROOT) for file in files]
    return sorted(path for path in paths if path.suffix in suffixes)


def module(path: Path) -> str:
    """models/llama.py → models.llama; a folder's __init__ is the folder's own name."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


FILES = tree(".py")
MODULES = {module(path): path for path in FILES}
EACH_FILE = pytest.mark.parametrize("path", FILES, ids=str)


def syntax(path: Path) -> ast.AST:
    return parsed((ROOT / path).read_text())


parsed = cache(ast.parse)  # a file's text is read by several tests


def named(path: Path) -> Iterator[str]:
    """The full names that a file imports, at the top or inside a function."""
    package = module(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            start = [*above, *([node.module] if node.module else [])]
            yield from (".".join([*start, alias.name]) for alias in node.names)


def imported(path: Path) -> set[str]:
    """The modules of the tree that a file imports; of `from quantbench.models import llama`, models.llama."""
    modules = set()
    for name in named(path):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        modules.add(name)
    return modules - {"", module(path)}


def floor(name: str) -> tuple[int, str] | None:
    """A module's floor within its room, and the entry of ROOMS that says so."""
    room, _, inside = name.partition(".")
    floors = ROOMS.get(room, ())
    if inside in ("", "__main__"):
        return len(floors) + bool(inside), inside
    entry = inside
    while entry and not any(entry in floor for floor in floors):
        entry = entry.rpartition(".")[0]
    entry = entry or "*"
    return next(((i, entry) for i, floor in enumerate(floors) if entry in floor), None)


def room_floor(name: str) -> int | None:
    room = name.split(".")[0]
    return next((i for i, floor in enumerate(FLOORS) if room in floor), None)


def wrong(importer: str, target: str) -> str | None:
    """Why one module must not import another, or None."""
    rooms = [name.split(".")[0] for name in (importer, target)]
    if rooms[0] != rooms[1]:
        high, low = room_floor(importer), room_floor(target)
        if high is None or low is None or low >= high:
            return f"{target}: {rooms[1]} is not on a floor below {rooms[0]} (FLOORS)"
        return None
    high, low = floor(importer), floor(target)
    if high is None or low is None or low[0] > high[0]:
        return f"{target} is on a floor above (ROOMS)"
    if low[0] == high[0] and low[1] != high[1]:
        return f"{target} is beside it, on the same floor (ROOMS)"
    return None


@EACH_FILE
def test_imports_run_downwards(path):
    reasons = [wrong(module(path), target) for target in sorted(imported(path))]
    assert not [reason for reason in reasons if reason]


@EACH_FILE
def test_every_file_is_on_a_floor(path):
    assert room_floor(module(path)) is not None, "add the module or folder to FLOORS"
    if len(path.parts) > 1:
        assert floor(module(path)) is not None, "add the file to its room in ROOMS"


def test_every_floor_has_its_files():
    """A name that nothing has would be on a floor for nothing."""
    folders = {".".join(path.parts[:i]) for path in FILES for i in range(1, len(path.parts))}
    names = {name for floor in FLOORS for name in floor}
    names |= {f"{room}.{n}" for room, floors in ROOMS.items() for floor in floors for n in floor}
    assert {name for name in names if not name.endswith("*")} <= folders | set(MODULES)


def test_no_two_files_import_each_other():
    """Nor in a circle: files of one folder have no floors of their own."""
    below = {name: imported(path) for name, path in MODULES.items()}
    while leaves := {name for name, targets in below.items() if not targets & set(below)}:
        below = {name: targets for name, targets in below.items() if name not in leaves}
    circle = {name: targets & set(below) for name, targets in below.items()}
    assert not circle


@EACH_FILE
def test_imports_by_name_are_declared(path):
    calls = (node.func for node in ast.walk(syntax(path)) if isinstance(node, ast.Call))
    names = {ast.unparse(call).rpartition(".")[2] for call in calls}
    assert bool(names & LATE_IMPORTS) == (str(path) in LATE)


def in_strings(path: Path) -> set[str]:
    """The modules of the tree that a file's strings name, such as "quantbench.run.loading:load"."""
    nodes = (node for node in ast.walk(syntax(path)) if isinstance(node, ast.Constant))
    texts = (node.value.partition(":")[0] for node in nodes if isinstance(node.value, str))
    return {text for text in texts if "." in text} & set(MODULES)


def test_imports_by_name_run_downwards():
    pairs = {(module(Path(file)), target) for file in LATE for target in in_strings(Path(file))}
    assert {pair for pair in pairs if wrong(*pair)} == UPWARDS
    assert {
        ("quantbench.models.registry", "quantbench.models.llama"),
        ("kv_cache", "quantbench.kv_cache.int4"),
    } <= pairs


def test_few_imports_are_by_name():
    assert len(LATE) <= 8 and all((ROOT / path).exists() for path in LATE)


@EACH_FILE
def test_the_log_needs_no_torch(path):
    if path.parts[0] in ("benchlog", "errors.py", "cli.py"):
        packages = {name.split(".")[0] for name in named(path)}
        assert not packages & {"torch", "torchao", "numpy", "transformers"}


@EACH_FILE
def test_no_file_edits_the_module_search_path(path):
    attributes = {node for node in ast.walk(syntax(path)) if isinstance(node, ast.Attribute)}
    assert not any(ast.unparse(node) == "sys.path" for node in attributes)


TYPED = [p for p in FILES if p.parts[0] in ("run", "compare", "benchlog") or p.stem == "spec"]
UNTYPED = re.compile(r"(dict|Mapping)\[str, (Any|object)\]")
AT_THE_BORDER = {"to_json", "as_json"}  # what they return is written as JSON


@pytest.mark.parametrize("path", TYPED, ids=str)
def test_no_untyped_dict_is_handed_on(path):
    """What a function gives to other files has a type whose fields are known."""
    functions = [node for node in ast.walk(syntax(path)) if isinstance(node, ast.FunctionDef)]
    public = [f for f in functions if f.name[0] != "_" and f.name not in AT_THE_BORDER]
    untyped = [f.name for f in public if f.returns and UNTYPED.search(ast.unparse(f.returns))]
    assert not untyped


@pytest.mark.parametrize("path", tree(".py", ".cpp", ".h"), ids=str)
def test_a_file_is_read_in_one_sitting(path):
    assert len((ROOT / path).read_text().splitlines()) <= 500


def test_no_file_names_a_folder_of_somebodys_machine():
    texts = [ROOT / path for path in tree(".py", ".cpp", ".h", ".md", ".toml")]
    texts += [ROOT / "Makefile", *ROOT.glob("*.txt"), *ROOT.glob("docs/*.*"), *ROOT.glob(".ci/*")]
    texts = [path for path in texts if path.suffix != ".png"]
    folder = re.compile(r"(?<![\w.~/])/(home|root|Users|work|mnt|srv)/\w")
    assert len(texts) > 100
    assert not [path for path in texts if folder.search(path.read_text())]


# ---------------------------------------------------------------------------------- the picture


def picture() -> dict[str, str]:
    """CONTRIBUTING's: name of the top level → what the picture says of it, in its order."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("\n## The house\n")[1].split("```")[1]
    entries: list[str] = []
    for line in text.strip("\n").splitlines():
        if line.startswith(" "):
            entries[-1] += " " + line.strip()
        else:
            entries.append(line)
    shown = {}
    for entry in entries:
        names = re.match(r"\w+/|\w+\.py(?: +\w+\.py)*", entry)
        assert names, f"no folder or file begins the line: {entry}"
        for name in names[0].split():
            shown[name.removesuffix("/").removesuffix(".py")] = entry[names.end() :]
    return shown


def inside(folder: str) -> tuple[set[str], set[str]]:
    """The modules and the folders with sources that are in a folder of the top level."""
    paths = [path for path in tree(".py", ".cpp") if path.parts[0] == folder]
    modules = {path.stem for path in paths if len(path.parts) == 2}
    return modules, {path.parts[1] for path in paths if len(path.parts) > 2}


def test_the_picture_shows_the_top_level():
    assert set(picture()) == set().union(*FLOORS) - {"setup"}


def test_the_picture_s_order_is_that_of_the_floors():
    floors = [room_floor(name) for name in picture()]
    assert floors == sorted(floors, reverse=True)


@pytest.mark.parametrize("folder", sorted(name for name in picture() if (ROOT / name).is_dir()))
def test_what_the_picture_names_is_there(folder):
    """And every folder within a folder is in the picture."""
    said = re.sub(r"\([^()]*\)", "", picture()[folder])
    modules, folders = inside(folder)
    assert set(re.findall(r"\b(\w+)/", said)) == folders
    parts = (part.strip() for part in re.split(r"[·,:;]| and ", said))
    names = {part.removesuffix(".py") for part in parts if re.fullmatch(r"\w+(\.py)?", part)}
    assert names <= modules


def spelled_out(name: str) -> set[str]:
    """The names that braces stand for: {a,b}.h is a.h and b.h."""
    if not (braces := re.search(r"{([^{}]*)}", name)):
        return {name}
    return {name.replace(braces[0], part, 1) for part in braces[1].split(",")}


def test_the_picture_of_the_kernels_names_every_file():
    """Each in its folder's part, by its path or its name alone; and no file that is not there."""
    text = (KERNELS / "README.md").read_text().split("## Which file calls which\n")[1]
    words = re.split(r"^(?:ops/cpu/)?(\w+)(?:\.py|/) ", text.split("```")[1], flags=re.M)[1:]
    parts = dict(zip(words[::2], words[1::2], strict=True))
    sources = {path.relative_to(KERNELS) for path in KERNELS.rglob("*.*") if path.suffix != ".md"}
    assert len(sources) > 70 and {path.parts[0] for path in sources} == set(parts)
    for folder, part in parts.items():
        listed = re.findall(r"[\w/{},]+\.(?:h|cpp)\b", part)
        names = set().union(*map(spelled_out, listed))
        inside = {path for path in sources if path.parts[0] == folder}
        assert [path for path in inside if not {str(path), path.name} & names] == []
        assert names <= {str(path) for path in sources} | {path.name for path in inside}


# ---------------------------------------------------------------------------------- the rules' own

MISTAKES = [
    ("errors", "quantbench.models.llama"),  # from another room, upwards
    ("quantbench.models.llama", "quantbench.quantize.spec"),  # beside
    ("quantbench.quantize.packed", "quantbench.quantize.registry"),  # upwards within a room
    ("quantbench.quantize.schemes.fp6", "quantbench.quantize.pruning"),  # beside within a room
    ("quantbench.quantize.spec", "quantize"),  # a file its own folder's __init__
    ("quantbench.run.sizes", "quantbench.compare.figures.rows"),
    ("new_module", "errors"),  # on no floor
    ("quantbench.quantize.new_module", "quantbench.quantize.spec"),
]


@pytest.mark.parametrize(("importer", "target"), MISTAKES)
def test_a_mistake_is_seen(importer, target):
    assert wrong(importer, target)


def test_imports_are_seen_wherever_they_stand(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    text = "from . import scheme\nfrom .schemes.fp6 import x\ndef f():\n    from .. import errors\n"
    (tmp_path / "quantize").mkdir()
    (tmp_path / "quantize" / "cpu.py").write_text(text + "    import models.llama as m\n")
    expected = {
        "quantbench.quantize.scheme",
        "quantbench.quantize.schemes.fp6",
        "errors",
        "quantbench.models.llama",
    }
    assert imported(Path("quantize/cpu.py")) == expected


def test_the_fast_tests_are_files_that_exist():
    """`make test-fast` names them; pytest refuses all where one is missing."""
    print_them = "show: ; @echo $(FAST_TESTS)"
    command = ["make", "-s", "--eval", print_them, "show"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(shown.split()) > 5
    assert [name for name in shown.split() if not (ROOT / name).exists()] == []
