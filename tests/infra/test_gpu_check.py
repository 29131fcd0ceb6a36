"""The GPU check reports every section, whatever becomes of the others."""

import json
import sys
from pathlib import Path

from infra.gpu_check.__main__ import run_all
from infra.gpu_check.inventory import NEEDED, USED_WHERE_THERE, missing
from infra.gpu_check.sections import Section, gpu_sections, run, sections_without_gpu


def python(name: str, code: str, timeout_s: float = 20.0) -> Section:
    return Section(name, (sys.executable, "-c", code), timeout_s)


def test_every_section_is_reported_though_others_fail_hang_or_die(tmp_path: Path) -> None:
    sections = [
        python("well", "print('fine')"),
        python("wrong", "print('oh'); raise SystemExit(3)"),
        python("hangs", "import time; print('so far', flush=True); time.sleep(60)", 1.5),
        python("dies", "import os; os.kill(os.getpid(), 11)"),
        python("last", "print('still here')"),
    ]
    report = run_all(sections, "", tmp_path)
    assert not report.is_well
    assert [each.status for each in report.outcomes] == [
        "passed",
        "failed (3)",
        "timed out after 2 s",
        "failed (-11)",
        "passed",
    ]
    assert report.outcomes[2].output == "so far\n"
    written = json.loads((tmp_path / "report.json").read_text())
    assert [each["name"] for each in written["outcomes"]] == [each.name for each in sections]
    text = (tmp_path / "report.md").read_text()
    assert "No GPU is here: nothing below has run on one." in text
    assert "| hangs | timed out after 2 s |" in text
    assert "still here" in text


def test_a_section_that_is_stopped_takes_its_children_along(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=None)"
    outcome = run(python("family", child.replace("input()", "import time; time.sleep(50)"), 1.0))
    assert outcome.status.startswith("timed out")
    assert outcome.seconds < 10


def test_all_of_it_takes_less_than_ten_minutes(tmp_path: Path) -> None:
    for sections in (gpu_sections(tmp_path), sections_without_gpu()):
        assert sum(section.timeout_s for section in sections) < 600


def test_this_machine_has_what_is_needed() -> None:
    found = missing(NEEDED)
    assert [name for name in found if not name.startswith("triton")] == []
    assert missing(("torch.nothing", "nowhere.at.all", "torch.Event")) == [
        "torch.nothing",
        "nowhere.at.all",
    ]
    assert set(missing(USED_WHERE_THERE)) <= set(USED_WHERE_THERE)
