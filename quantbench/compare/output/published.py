"""Published tables of measured and estimated runs, as text: audited, or held against our estimates.

print(audited(["published.rst"]))
text, cases = validated(["published.rst", "results.json"], device="NVIDIA RTX A6000")
"""

from collections.abc import Iterable, Sequence

from quantbench.errors import UsageError
from quantbench.estimate.audit import audit
from quantbench.estimate.audit_energy import unmeasured
from quantbench.estimate.datasheets import find
from quantbench.estimate.tables import is_table, read
from quantbench.estimate.validate import as_json, of_results, of_tables, report
from quantbench.text import counted

# Said above the figures, because they were published as they stand in the table below.
UPPER_BOUND = "Energy that is estimated is power limit × time ÷ tokens: an upper bound."


def audited(paths: Iterable[str]) -> str:
    """What is wrong with the tables in these files, by column; what is only worth knowing last."""
    lines = []
    for path in dict.fromkeys(paths):
        for table in read(path):
            findings = audit(table)
            wrong = sum(finding.wrong for finding in findings)
            name = f"{path}, line {table.line}" + (f", {table.title}" if table.title else "")
            verdict = f"{counted(wrong, 'thing')} wrong" if wrong else "nothing wrong was found"
            lines.append(f"{name}: {counted(len(table.rows), 'row')}, {verdict}")
            for finding in sorted(findings, key=lambda finding: not finding.wrong):
                note = "" if finding.wrong else "note: "
                lines.append(f"  {note}{finding.column}: {finding.text}")
    return "\n".join(lines)


def validated(paths: Sequence[str], device: str | None = None) -> tuple[str, object]:
    """The report of the cases in these files (.rst, .md: published tables; others: results), and
    the cases for JSON. device: a card for which the models of the first table are predicted.

    Raises UsageError for a device without a datasheet, or without a table.
    """
    tables = [path for path in paths if is_table(path)]
    if device is not None:
        find(device)
        if not tables:
            raise UsageError(
                "--device predicts the models of a published table: give one (.rst, .md)"
            )
    cases = of_tables(tables, device) if tables else []
    for path in paths:
        if path not in tables:
            cases += of_results(path)
    text = report(cases)
    if any("energy" in case.estimated and "energy" not in case.measured for case in cases):
        text += f"\n{UPPER_BOUND}\n"
    left_out = {device: None for path in tables for table in read(path)
                for device in sorted(unmeasured(table))}  # fmt: skip
    if left_out:
        text += (
            f"\nEnergies that a table calls measured are left out for {', '.join(left_out)}: they "
            "do not stand up to quantbench estimate audit.\n"
        )
    return text, as_json(cases)
