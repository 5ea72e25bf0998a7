"""What the shell offers for an option's value: schemes, caches, decoders, models, files.

click asks for it while a person types, in a process of its own for each TAB: no torch here.
"""

from collections.abc import Callable
from functools import partial

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from quantbench.log.config import option_table
from quantbench.log.kinds import Choice
from quantbench.models.presets import PRESETS
from quantbench.quantize.spec import MEASURED, SHOWN

# What is offered for an option or argument of that name.
VALUES: dict[str, tuple[str, ...]] = {
    "quantization": (*SHOWN, *MEASURED),
    "schemes": SHOWN,
    "names": (*SHOWN, *MEASURED),
    "checkpoint_path": ("tiny", "tiny_moe", *(f"dummy:{name}" for name in PRESETS)),
    "device": ("auto", "cpu", "cuda", "mps", "xpu"),
    "arms": ("all",),
    "expert_memory": ("auto",),
    "expert_placement": ("popularity", "uniform", "first"),
    **{name: o.kind.choices for name, o in option_table().items() if isinstance(o.kind, Choice)},
}
LISTS = {"schemes"}  # their values are several, with commas between
FOLDERS = {"checkpoint_path"}  # and options whose placeholder is DIR
FILES = {"expert_placement"}  # which may be a file, and the options of PATHS
PATHS = {"PATH", "FILE"}  # placeholders of options whose values are files
Offered = Callable[[click.Context, str], list[CompletionItem]]


def attach(command: click.Command) -> None:
    """Have the command's options and arguments offer values."""
    for parameter in command.params:
        offered = partial(offer, parameter, parameter.shell_complete)
        vars(parameter)["shell_complete"] = offered


def offer(
    parameter: click.Parameter, usual: Offered, context: click.Context, incomplete: str
) -> list[CompletionItem]:
    """usual: what click itself offers, such as the names of a click.Choice."""
    name = parameter.name or ""
    before, comma, last = incomplete.rpartition(",") if name in LISTS else ("", "", incomplete)
    values = [value for value in VALUES.get(name, ()) if value.startswith(last)]
    items = [CompletionItem(f"{before}{comma}{value}") for value in values]
    if items:  # bash forgets them where folders or files are offered, too
        return items
    if name in FOLDERS or parameter.metavar == "DIR":
        return [CompletionItem(incomplete, type="dir")]
    if parameter.metavar in PATHS or name in FILES:
        return [CompletionItem(incomplete, type="file")]
    return usual(context, incomplete)


class Bash(BashComplete):
    """bash would end a word at a colon, and `dummy:Llama-2-7b` is one word."""

    source_template = f"COMP_WORDBREAKS=${{COMP_WORDBREAKS//:}}\n{BashComplete.source_template}"


add_completion_class(Bash)
