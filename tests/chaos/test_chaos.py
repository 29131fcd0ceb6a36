"""A short sample of `make chaos`: a worker dies, Redis forgets everything, an API node dies."""

import pytest

from tests.chaos.customers import Question, Try
from tests.chaos.run import torment_all


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_streams_go_on_and_money_stays_exact_while_everything_dies_in_turn() -> None:
    outcome = torment_all(("sqlite",), seconds=8.0, every_s=2.5)
    assert outcome.is_good, outcome.problems
    assert outcome.faults >= 3
    assert outcome.resumed > 0


def test_a_customer_notices_another_answer() -> None:
    def answered(text: str, tokens: int = 3) -> Try:
        heard = Try("api")
        heard.hear({"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": "length"}]})
        heard.hear({"id": "x", "choices": [], "usage": {"completion_tokens": tokens}})
        return heard

    assert answered("the same").same_answer(answered("the same"))
    assert not answered("the same").same_answer(answered("the sane"))
    assert not answered("the same").same_answer(answered("the same", tokens=4))
    bodies = [Question.number(index).body for index in range(12)]
    assert {body["n"] for body in bodies} == {1, 2}
    assert len({body["prompt"] for body in bodies}) == 12
