"""The report of a run: Markdown for people, JSON for scripts, the same in both."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.gpu_check.sections import Outcome

NO_GPU = "No GPU is here: nothing below has run on one. What could be checked without was."


@dataclass(frozen=True, slots=True)
class Report:
    """All sections of one run."""

    gpu: str
    """Its name; empty where there is none."""
    date: str
    outcomes: list[Outcome]

    @property
    def is_well(self) -> bool:
        """Whether every section passed."""
        return all(outcome.status == "passed" for outcome in self.outcomes)

    def write(self, directory: Path) -> None:
        """`report.md` and `report.json`."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "report.md").write_text(self.markdown(), encoding="utf-8")
        (directory / "report.json").write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")

    def markdown(self) -> str:
        """A table, and the end of what each section printed."""
        lines = [f"# GPU check of {self.date}", "", self.gpu or NO_GPU, ""]
        lines += ["| section | result | seconds |", "|---|---|--:|"]
        lines += [f"| {each.name} | {each.status} | {each.seconds} |" for each in self.outcomes]
        for each in self.outcomes:
            lines += ["", f"## {each.name}: {each.status}", "", "```", each.output.strip(), "```"]
        return "\n".join(lines) + "\n"
