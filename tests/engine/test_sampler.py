"""What changes logits before a token is chosen, many rows at once, beside one row by hand."""

import random

import torch

from engine.messages import Sampling
from engine.sampler import adjust_logits
from engine.sequence import Sequence
from tests.engine.driver import request

VOCAB = 97


def sequence_of(chance: random.Random, name: str) -> Sequence:
    sampling = Sampling(
        repetition_penalty=chance.choice((1.0, 1.5, 0.5)),
        frequency_penalty=chance.choice((0.0, 0.5, -1.0)),
        presence_penalty=chance.choice((0.0, 0.25)),
        logit_bias=chance.choice((None, {1: 2.0, 96: -100.0, 400: 3.0})),
        min_tokens=chance.choice((0, 3, 9)),
        stop_token_ids=chance.choice(((), (2,), (2, 500))),
    )
    prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 40))]
    [sequence] = Sequence.all_of(request(name, prompt, 20, sampling=sampling), 0)
    for _ in range(chance.randint(0, 8)):
        sequence.append(chance.randrange(VOCAB))
    return sequence


def by_hand(row: list[float], sequence: Sequence) -> list[float]:
    sampling = sequence.request.sampling
    said = sequence.token_ids[: sequence.num_tokens].tolist()
    output = sequence.output_token_ids.tolist()
    found = []
    for token, own in enumerate(row):
        logit = own
        if token in said:
            penalty = sampling.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= sampling.frequency_penalty * output.count(token)
        logit -= sampling.presence_penalty * (token in output)
        logit += (sampling.logit_bias or {}).get(token, 0.0)
        if len(output) < sampling.min_tokens and token in sampling.stop_token_ids:
            logit = float("-inf")
        found.append(logit)
    return found


def test_every_row_is_adjusted_as_it_asks_and_no_other() -> None:
    chance = random.Random(7)
    for _ in range(20):
        logits = torch.randn(20, VOCAB)
        before = logits.clone()
        rows = chance.sample(range(20), 12)
        adjusted = [(row, sequence_of(chance, f"r{row}")) for row in rows]
        expected = before.clone()
        for row, sequence in adjusted:
            expected[row] = torch.tensor(by_hand(before[row].tolist(), sequence))
        torch.testing.assert_close(adjust_logits(logits, adjusted), expected)
        assert torch.equal(logits, before), "the model's own stay for the logprobs"
