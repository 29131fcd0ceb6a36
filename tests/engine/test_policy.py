"""The setting `policy`: another engine's rules on our kernels."""

from pathlib import Path

import pytest

from engine.settings import EngineSettings
from engine.worker.loading import load_engine
from tests.engine.driver import Driver, request
from tests.engine.tiny import save_tiny

LONG, SHORT = 5 * 64 - 1, 5
"""The long one leaves no room for the short one in its last step of 64 tokens."""


@pytest.mark.parametrize(("policy", "first"), [("ncompass", "short"), ("vllm", "long")])
def test_a_worker_plans_by_the_rules_that_it_is_told(
    tmp_path: Path, policy: str, first: str
) -> None:
    save_tiny("LlamaConfig", tmp_path)
    settings = EngineSettings.model_validate(
        {
            "policy": policy,
            "device": "cpu",
            "dtype": "fp32",
            "num_threads": 1,
            "kv_cache_mib": 16,
            "max_step_tokens": 64,
            "calibration_cache": tmp_path / "calibration",
        }
    )
    driver = Driver(load_engine(tmp_path, settings).engine)
    driver.add(request("long", list(range(LONG)), 2, key=1.0))
    driver.add(request("short", list(range(SHORT)), 2, key=0.1))
    while not driver.received:
        driver.step()
    ((name, _index),) = driver.received
    assert name == first
