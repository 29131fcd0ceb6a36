"""`python -m infra.gpu_check`: every GPU test and benchmark, each within its time, one report.

Any Python that has torch, Triton and pytest will do; the engine's section needs msgspec,
pydantic-settings, structlog and transformers as well, and fails by itself where they are missing. See
`inventory` for the versions. Without a GPU it says so, and runs what needs none, with all that the
other tests need. The report is written to --out after every section.
"""

import argparse
import importlib
import sys
from datetime import UTC, datetime
from pathlib import Path

from infra.gpu_check.report import NO_GPU, Report
from infra.gpu_check.sections import Section, gpu_sections, run, sections_without_gpu


def main() -> int:
    """Run all sections; 1 where one of them did not pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("var/gpu_check"))
    parser.add_argument("--only", help="sections whose name contains this")
    arguments = parser.parse_args()
    gpu = gpu_name()
    arguments.out.mkdir(parents=True, exist_ok=True)
    sections = gpu_sections(arguments.out) if gpu else sections_without_gpu()
    print(gpu or NO_GPU)
    report = run_all(
        [each for each in sections if (arguments.only or "") in each.name], gpu, arguments.out
    )
    print(f"{arguments.out / 'report.md'}: sections={len(report.outcomes)} well={report.is_well}")
    return int(not report.is_well)


def run_all(sections: list[Section], gpu: str, out: Path) -> Report:
    """One after the other; what is known so far is always on disk."""
    report = Report(gpu, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), [])
    for section in sections:
        outcome = run(section)
        report.outcomes.append(outcome)
        report.write(out)
        print(f"{outcome.name:40} {outcome.status:24} {outcome.seconds:8.1f} s")
    return report


def gpu_name() -> str:
    """The first GPU that torch can use; empty where there is none, or no torch."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return ""
    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else ""


if __name__ == "__main__":
    sys.exit(main())
