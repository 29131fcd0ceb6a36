"""What changes logits before a token is chosen, many rows at once, beside one row by hand."""

import random

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import AdjustedRow
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


def drafts_of(chance: random.Random) -> NDArray[np.int32]:
    drafts = [chance.randrange(VOCAB) for _ in range(chance.choice((0, 0, 1, 4)))]
    return np.array(drafts, dtype=np.int32)


def by_hand(row: list[float], sequence: Sequence, drafts: list[int]) -> list[float]:
    sampling = sequence.request.sampling
    said = sequence.token_ids[: sequence.num_tokens].tolist() + drafts
    output = sequence.output_token_ids.tolist() + drafts
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
        adjusted = [
            AdjustedRow(row, sequence_of(chance, f"r{row}"), drafts_of(chance)) for row in rows
        ]
        expected = before.clone()
        for row, sequence, drafts in adjusted:
            by_now = by_hand(before[row].tolist(), sequence, drafts.tolist())
            expected[row] = torch.tensor(by_now)
        torch.testing.assert_close(adjust_logits(logits, adjusted), expected)
        assert torch.equal(logits, before), "the model's own stay for the logprobs"
