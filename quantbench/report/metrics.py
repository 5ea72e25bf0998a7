"""A comparison of latencies as prose, in Markdown: templates/metrics.md.j2.

    files.write_text("--narrative", path, metrics.text(comparisons))

Names from the data become code spans.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jinja2

from quantbench.answer.compared import CONFIDENCE
from quantbench.answer.metrics import Comparison
from quantbench.text import counted, one_line

TEMPLATES = Path(__file__).parent / "templates"
VERDICTS = (
    ("better", "The target is better in"),
    ("worse", "The baseline is better in"),
    ("no difference shown", "No difference is shown in"),
    ("not in turns", "Without a verdict, as it was not measured in turns:"),
)


def text(comparisons: Sequence[Comparison]) -> str:
    """The whole report. comparisons: at least one."""
    made = jinja2.Environment(  # Markdown, in which HTML's escapes would be shown as they are
        loader=jinja2.FileSystemLoader(TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=False,
    )
    made.filters |= {
        name: partial(_counted, f"{name[:-1]}") for name in ("tokens", "ranks", "runs")
    }
    made.filters |= {"code": _code, "sentence": lambda text: text[:1].upper() + text[1:]}
    template = made.get_template("metrics.md.j2")
    given = {"confidence": f"{100 * CONFIDENCE:.0f}", "verdict_words": VERDICTS}
    return template.render(comparisons=comparisons, **given).strip() + "\n"


def _counted(noun: str, number: int) -> str:
    return counted(number, noun)


def _code(name: str) -> str:
    return f"`{one_line(name).replace('`', chr(39)) or '-'}`"
