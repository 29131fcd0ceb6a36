"""One family: its tiny model through our engine, token for token beside `generate`.

`python -m tests.models.family` answers names on standard input with verdicts on standard output,
one JSON line each, so that transformers is imported once for many families.
"""

import json
import resource
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine.engine import Engine
from engine.errors import ModelRefused
from engine.model_runner import ModelRunner
from engine.models.choice import load_model
from engine.models.model import Model
from engine.settings import EngineSettings
from tests.engine.driver import Driver, request
from tests.models.tiny_configs import NOT_TEXT, VOCAB_SIZE, tiny_config

NUM_TOKENS = 12
PROMPT_LENS = (3, 17, 64, 65, 130)
CROWD_LENS = (58, 59, 60, 61)
"""They all grow into a second block, and there are not enough blocks for all."""
RESUMED_DIFFERS = "preempted sequences differ"
MAX_PARAMETERS = 120e6
MEMORY_BYTES = 12 << 30


@dataclass(frozen=True)
class Verdict:
    """What became of one family."""

    family: str
    state: str
    """`identical`, `different` (a fault of ours), `unsteady`, `refused` or `impossible`."""
    tier: str = ""
    reason: str = ""
    """Why no faster tier runs it, or why none does."""


def judge(family: str) -> Verdict:
    """Build, load, and generate in four ways; never raises for a family that cannot be built."""
    if family in NOT_TEXT:
        return Verdict(family, "impossible", reason=NOT_TEXT[family])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        try:
            save_family(family, path)
            prompts = prompts_of(PROMPT_LENS)
            crowd = prompts_of(CROWD_LENS)
            expected = generate(path, [*prompts, *crowd])
        except Exception as fault:
            return Verdict(family, "impossible", reason=one_line(fault))
        try:
            model, report = load_model(path, torch.float32, torch.device("cpu"))
        except ModelRefused as refusal:
            return Verdict(family, "refused", reason=refusal.message)
        problem = difference(model, prompts, crowd, expected)
        if problem is None:
            return Verdict(family, "identical", report.tier, report.reason)
        if problem == RESUMED_DIFFERS and not is_steady(path, crowd, expected[len(prompts) :]):
            return Verdict(family, "unsteady", report.tier, report.reason)
    return Verdict(family, "different", report.tier, problem)


def is_steady(directory: Path, crowd: list[list[int]], expected: list[list[int]]) -> bool:
    """Whether the original itself goes on in the same way when its output becomes its prompt."""
    cuts = [4, 8]
    resumed = [p + out[:cut] for p, out in zip(crowd, expected, strict=True) for cut in cuts]
    rest = [out[cut:] for out in expected for cut in cuts]
    return [
        output[: len(tail)] for output, tail in zip(generate(directory, resumed), rest, strict=True)
    ] == rest


def difference(
    model: Model, prompts: list[list[int]], crowd: list[list[int]], expected: list[list[int]]
) -> str | None:
    """Run the prompts batched, chunked, with prefix hits, preempted; what differs, or None."""
    few = len(prompts)
    driver = driver_of(model, 64)
    if driver.generate(requests("first", prompts)) != expected[:few]:
        return "a chunked batch differs"
    if driver.generate(requests("again", prompts)) != expected[:few]:
        return "a second batch, from the prefix cache, differs"
    num_cached = driver.received[f"again{few - 1}", 0].num_cached_tokens
    if num_cached != (128 if model.spec.shares_blocks else 0):
        return f"{num_cached} tokens came from the prefix cache"
    scarce = driver_of(model, 5)
    if scarce.generate(requests("crowd", crowd)) != expected[few:]:
        return RESUMED_DIFFERS
    if scarce.engine.stats.num_preemptions == 0:
        return "nothing was preempted"
    forked = driver_of(model, 64)
    forked.generate([request("n", prompts[1], NUM_TOKENS, num_choices=2)])
    if [forked.received["n", choice].token_ids for choice in (0, 1)] != [expected[1]] * 2:
        return "two choices of one prompt differ"
    return None


def driver_of(model: Model, num_blocks: int) -> Driver:
    """An engine that chunks prompts at 64 tokens."""
    settings = EngineSettings(max_step_tokens=64)
    return Driver(Engine(ModelRunner(model, num_blocks), settings, num_blocks))


def requests(name: str, prompts: list[list[int]]) -> list[Any]:
    """One request for each prompt."""
    return [request(f"{name}{i}", prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)]


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    """Random tokens without the special first ones."""
    generator = torch.Generator().manual_seed(11)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths
    ]


def save_family(family: str, directory: Path) -> None:
    """Random weights of the family's tiny configuration, as a checkpoint."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    config = tiny_config(family)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"its smallest configuration here has {size / 1e6:.0f} M parameters")
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def generate(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates for each prompt by itself."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def one_line(fault: Exception) -> str:
    """A fault in a table's cell."""
    return f"{type(fault).__name__}: {' '.join(str(fault).split())[:160]}"


def admit_eagerly() -> None:
    """Reserve no growth, so that running sequences take blocks from each other."""
    from engine.scheduling import outlook

    outlook.EXPECTED_OUTPUT_TOKENS = 1.0
    outlook.EXPECTATION_RATE = 0.0
    outlook.MIN_GROWTH_TOKENS = 1


def main() -> None:
    """Answer until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    torch.set_num_threads(1)
    admit_eagerly()
    answers, sys.stdout = sys.stdout, sys.stderr  # some models print
    for line in sys.stdin:
        print(json.dumps(asdict(judge(line.strip()))), file=answers, flush=True)


if __name__ == "__main__":
    main()
