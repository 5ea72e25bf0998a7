"""Reports from templates/, which jinja2 fills: pages in HTML, and Markdown.

filled("report.html", title="<b>", …)     # in HTML names are escaped, as they are a person's text
"""

from pathlib import Path

import jinja2

from quantbench.text import counted, one_line

TEMPLATES = Path(__file__).parent / "templates"


def filled(name: str, **values: object) -> str:
    """The template of this name with these values."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=name.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters |= {
        "code": lambda name: f"`{one_line(name).replace('`', chr(39)) or '-'}`",
        "counted": counted,
        "plain": plain,
        "sentence": lambda text: text[:1].upper() + text[1:],
    }
    return made.get_template(name).render(**values).strip() + "\n"


def plain(text: str) -> str:
    """Text as Markdown shows it: no HTML, no new column."""
    return text.replace("<", "&lt;").replace("|", "\\|")
