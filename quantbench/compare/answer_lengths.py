"""recommend --answers: how long the answers of those arms are that the recommendation names, and
the seconds that they take.

    lines(rows, answer, folder)        # kept in folder/answers.json as each is measured
"""

import json
from collections.abc import Sequence
from pathlib import Path

from quantbench import files
from quantbench.compare.recommend import Recommendation
from quantbench.compare.row import Row
from quantbench.errors import UsageError
from quantbench.log import shell
from quantbench.log.options import parse
from quantbench.typed_json import from_json, parsed, to_json

FILE = "answers.json"


def check(checkpoints: Sequence[str]) -> None:
    """Raise UsageError for a model of random weights."""
    for path in checkpoints:
        if path.startswith("dummy:"):
            raise UsageError(
                f"--answers: --checkpoint_path {path} has random weights: leave it out"
            )


def lines(rows: Sequence[Row], answer: Recommendation, folder: Path | None) -> list[str]:
    """A line for each arm that is named, but the baseline."""
    from quantbench.quality.answers import Answer, answers, compared
    from quantbench.quality.judge import OF_THE_RUN, Held
    from quantbench.run.plan import begin, make_plan

    file = folder / FILE if folder else None
    kept: dict[str, list[Answer]] = {}
    if file and file.exists():
        said = parsed(files.read_text("--answers", file))
        kept = {name: [from_json(Answer, one) for one in each] for name, each in said.items()}

    def of(row: Row) -> list[Answer]:
        config = parse(row.argv).without(OF_THE_RUN)
        name = shell.join(row.argv)
        if name not in kept:
            arm = Held(begin(make_plan(config)))
            kept[name] = answers(arm.plan, arm.model)
            arm.free()
            if file:
                text = json.dumps(to_json(kept), indent=1) + "\n"
                files.write_text("--answers", file, text, follow=False)
        return kept[name]

    named = {choice.arm for choice in answer.choices} - {rows[0].arm}
    found, full = [], of(rows[0]) if named else []
    for row in rows:
        if row.arm in named:
            lengths = compared(of(row), full)
            line = f"{row.arm}: {lengths.sentence()}"
            if row.decode_tok_s:
                line += f"; {lengths.time(row.decode_tok_s, rows[0].decode_tok_s)}"
            found.append(line)
    return found
