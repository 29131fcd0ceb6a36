"""What speculation gains where texts repeat themselves, and costs where they do not.

    python -m engine.benchmarks.speculation --path var/models/…

Each load with drafts and without, in turns: an edit that copies most of its prompt, ordinary answers,
and random tokens that are gone on with at random; one at a time and eight at once. The ratio is tokens a
second with drafts over those without, prefill included; the texts must be the same.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.engine import Engine
from engine.messages import GenerateRequest, Sampling
from engine.settings import EngineSettings
from engine.worker.loading import load_engine
from engine.worker.machine import num_threads
from kernels.cpu import library
from kernels.cpu.heap import keep_freed_memory

OUTPUT_TOKENS = 96
NUM_TURNS = 4
"""The best of each counts: whatever else runs on the machine only makes a turn longer."""
PASSAGE = """def monthly_report(orders, refunds, currency):
    revenue = sum(order.amount for order in orders)
    returned = sum(refund.amount for refund in refunds)
    customers = {order.customer for order in orders}
    average = revenue / max(1, len(customers))
    lines = [f"revenue: {revenue} {currency}"]
    lines.append(f"returned: {returned} {currency}")
    lines.append(f"customers: {len(customers)}")
    lines.append(f"average: {average:.2f} {currency}")
    return lines
"""
EDIT = (
    f"Before:\n\n{PASSAGE}\nAfter, with one name changed:\n\n{PASSAGE}\nOnce more:\n\ndef monthly"
)
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a fisherman and his daughter.",
    "Explain to a child why the sky is blue.",
    "What should one pack for a week in the mountains?",
    "How does a bill become law?",
    "Describe the taste of coffee.",
    "Why do cats purr?",
    "Give advice to somebody who starts a new job.",
)


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts that are answered side by side."""

    name: str
    prompts: list[list[int]]
    temperature: float = 0.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    arguments = parser.parse_args()
    settings = EngineSettings(dtype=arguments.precision, is_prefix_cache_on=False)
    built = library.build(settings.kernel_cache)
    if built.path is not None:
        library.enable(built.path, num_threads(settings))
    engines = {
        is_on: load_engine(
            arguments.path,
            settings.model_copy(update={"is_speculation_on": is_on}),
            pool_bytes=1 << 28,
        ).engine
        for is_on in (True, False)
    }
    keep_freed_memory()
    figures: dict[str, float] = {}
    for load in loads(Tokenizer.from_file(str(arguments.path / "tokenizer.json"))):
        rate, share = measure(engines[True], engines[False], load)
        print(f"{load.name:22} {rate:5.2f} x the tokens/s, {share:.0%} of the drafts were right")
        figures[f"speculation_{load.name}_ratio"] = rate
    print(json.dumps(figures))


def loads(tokenizer: Tokenizer) -> list[Load]:
    """What is asked."""
    asked = [f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in QUESTIONS]
    edit, *questions = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in (EDIT, *asked)
    )
    generator = torch.Generator().manual_seed(3)
    random = [torch.randint(1000, 40_000, (128,), generator=generator).tolist() for _ in range(8)]
    return [
        Load("edit_1", [edit]),
        Load("edit_8", [[1000 + index, *edit] for index in range(8)]),
        Load("answers_1", questions[1:2]),
        Load("answers_8", questions),
        Load("random_1", random[:1], temperature=1.0),
        Load("random_8", random, temperature=1.0),
    ]


def measure(with_drafts: Engine, without: Engine, load: Load) -> tuple[float, float]:
    """(tokens a second with drafts over those without, the part of the drafts that was right)."""
    before = with_drafts.stats
    best_s = {id(engine): float("inf") for engine in (with_drafts, without)}
    for _ in range(NUM_TURNS):
        texts = []
        for engine in (with_drafts, without):
            seconds, said = answer(engine, load)
            best_s[id(engine)] = min(best_s[id(engine)], seconds)
            texts.append(said)
        assert texts[0] == texts[1], "drafts changed a text"
    after = with_drafts.stats
    num_drafts = after.num_drafts - before.num_drafts
    num_right = after.num_accepted_drafts - before.num_accepted_drafts
    return best_s[id(without)] / best_s[id(with_drafts)], num_right / max(1, num_drafts)


def answer(engine: Engine, load: Load) -> tuple[float, Sequence[list[int]]]:
    """Seconds until all are answered, and the answers."""
    for index, prompt in enumerate(load.prompts):
        sampling = Sampling(temperature=load.temperature, seed=index)
        engine.add(_request(f"{load.name}-{index}", prompt, sampling))
    texts: dict[str, list[int]] = {}
    began_s = time.perf_counter()
    while engine.has_work:
        for frames in engine.step().frames.values():
            for frame in frames:
                texts.setdefault(frame.request_id, []).extend(frame.token_ids)
    return time.perf_counter() - began_s, [texts[key] for key in sorted(texts)]


def _request(request_id: str, prompt: list[int], sampling: Sampling) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        model="benchmark",
        node="benchmark",
        tenant="benchmark",
        prompt_token_ids=prompt,
        sampling=sampling,
        authorized_tokens=OUTPUT_TOKENS,
        max_tokens=OUTPUT_TOKENS,
        arrival_ms=0,
        key=0.0,
    )


if __name__ == "__main__":
    main()
