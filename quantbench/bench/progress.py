"""What a command is doing: one line that moves on a terminal; elsewhere a line for each change.

with Progress() as progress:
    progress("int8wo: loading", "arm 3 of 26; about 4 min left")    # what, and how far
    progress("measuring", "cycle 12")
    progress("measuring", "cycle 13")                       # the same thing: no new line
"""

from typing import Any

from quantbench.progress import can_erase, say


class Progress:
    def __init__(self) -> None:
        self.what = ""
        self.status: Any = None

    def __enter__(self) -> "Progress":
        if can_erase():
            from rich.console import Console

            self.status = Console(stderr=True).status("")
            self.status.start()
        return self

    def __exit__(self, *of_error: object) -> None:
        if self.status:
            self.status.stop()

    def __call__(self, what: str, how_far: str = "") -> None:
        line = "; ".join(filter(None, (what, how_far)))
        if self.status:
            from rich.markup import escape

            self.status.update(escape(line))
        elif what != self.what:
            say(line)
        self.what = what

    def say(self, line: str) -> None:
        """A line that stays."""
        if self.status:
            self.status.console.print(line, markup=False, highlight=False)
        else:
            say(line)


def duration(seconds: float) -> str:
    """A time for people: 8 s, 4 min, 2.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
