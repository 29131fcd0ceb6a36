"""What an engine keeps of requests that are over: its prefix cache has a set size, and that is all."""

from tests.engine.driver import Driver, create_driver, request
from tests.engine.fake_model import FakeModel
from tests.plateau import traced_bytes, tracing

PROMPTS = 150
KEPT_BYTES_MAX = 100
"""Of each further request."""


def answer(driver: Driver, first: int) -> None:
    """Distinct prompts, in waves of ten; some with two choices, some cancelled, some told enough."""
    for number in range(first, first + PROMPTS):
        prompt = [number % 500, number // 500] * 80
        driver.add(request(f"r{number}", prompt, 12, num_choices=1 + number % 2))
        if number % 10 == 9:
            driver.step()
            driver.engine.cancel(f"r{number}")
            driver.engine.end_choice(f"r{number - 2}", 1)
            driver.run()
    for kept in (driver.received, driver.emitted, driver.finished):
        kept.clear()


def test_memory_does_not_grow_with_the_requests_that_are_over() -> None:
    driver = create_driver(FakeModel(), 64)
    answer(driver, 0)
    with tracing():
        answer(driver, 1_000)
        before = traced_bytes()
        answer(driver, 2_000)
        kept = (traced_bytes() - before) / PROMPTS
    assert kept < KEPT_BYTES_MAX, f"{kept:.0f} bytes of each request"
