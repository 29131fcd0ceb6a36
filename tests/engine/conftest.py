"""One compute thread a test process: the tests run beside each other on few cores."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def eager_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit without reserving growth, so that running sequences take blocks from each other."""
    monkeypatch.setattr("engine.scheduling.outlook.EXPECTED_OUTPUT_TOKENS", 1.0)
    monkeypatch.setattr("engine.scheduling.outlook.EXPECTATION_RATE", 0.0)
    monkeypatch.setattr("engine.scheduling.outlook.MIN_GROWTH_TOKENS", 1)
