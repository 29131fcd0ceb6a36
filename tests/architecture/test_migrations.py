"""The migrations are one line: two that follow the same one stop every start of the platform."""

import re
from pathlib import Path

VERSIONS = Path(__file__).parents[2] / "migrations" / "versions"


def test_each_migration_is_followed_by_one_other_at_most() -> None:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in VERSIONS.glob("2*.py")}
    followed = [
        found.group(1)
        for text in texts.values()
        if (found := re.search(r'^down_revision = "(.+)"$', text, re.MULTILINE))
    ]
    assert sorted(followed) == sorted(set(followed))
    assert len(followed) == len(texts) - 1, "one begins, and one is the last"
    assert set(followed) <= texts.keys()
