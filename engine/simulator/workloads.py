"""Made-up loads of known kinds; the same seed gives the same requests.

Lengths are those of the study that the scheduler was designed with: log-normal chat, a few prompts
of tens of thousands of tokens, agents that send a long context of which nearly all is known.
"""

from collections.abc import Callable
from random import Random

from engine.simulator.trace import TracedRequest

NUM_TENANTS = 20
LONG_SHARE = 0.05
NUM_AGENTS = 12
"""At the least, open at a time: their contexts fit into the KV cache of one GPU together."""
FLOOD_REQUESTS = 10_000
FLOODING_TENANT = "flooding"

Draw = Callable[[Random, int], tuple[int, int]]
"""(prompt tokens, output tokens) of the request with this number."""


def _log_normal(random: Random, mean: float, deviation: float, least: int, most: int) -> int:
    return int(min(most, max(least, random.lognormvariate(mean, deviation))))


def _chat_lengths(random: Random, _index: int) -> tuple[int, int]:
    return _log_normal(random, 5.6, 1.1, 16, 8000), _log_normal(random, 5.2, 0.8, 4, 1500)


def _mixed_lengths(random: Random, _index: int) -> tuple[int, int]:
    if random.random() < LONG_SHARE:
        return random.randint(16_000, 60_000), random.randint(50, 400)
    return _log_normal(random, 5.8, 1.0, 16, 6000), _log_normal(random, 5.2, 0.8, 4, 1500)


def _small_lengths(random: Random, _index: int) -> tuple[int, int]:
    if random.random() < LONG_SHARE:
        return random.randint(1200, 1900), _log_normal(random, 4.0, 0.6, 4, 200)
    return _log_normal(random, 5.0, 0.8, 16, 900), _log_normal(random, 4.0, 0.6, 4, 200)


def _poisson(draw: Draw, rate: float, num_requests: int, seed: int) -> list[TracedRequest]:
    random = Random(seed)  # noqa: S311 - reproducible on purpose
    requests, arrival_s = [], 0.0
    for index in range(num_requests):
        arrival_s += random.expovariate(rate)
        prompt, output = draw(random, index)
        tenant = f"tenant-{random.randrange(NUM_TENANTS)}"
        requests.append(TracedRequest(arrival_s, prompt, output, tenant))
    return requests


def chat(rate: float, num_requests: int, seed: int = 1) -> list[TracedRequest]:
    """Short prompts and answers of `NUM_TENANTS` tenants."""
    return _poisson(_chat_lengths, rate, num_requests, seed)


def mixed(rate: float, num_requests: int, seed: int = 1) -> list[TracedRequest]:
    """Chat with 5 % prompts of 16,000 to 60,000 tokens."""
    return _poisson(_mixed_lengths, rate, num_requests, seed)


def small(rate: float, num_requests: int, seed: int = 1) -> list[TracedRequest]:
    """Mixed for a small model on a CPU: 5 % prompts of 1,200 to 1,900 tokens, the rest below 900."""
    return _poisson(_small_lengths, rate, num_requests, seed)


def agent(rate: float, num_requests: int, seed: int = 1) -> list[TracedRequest]:
    """Conversations of agents: each call sends all that was said before, and some more."""
    random = Random(seed)  # noqa: S311
    requests, arrival_s, num_agents = [], 0.0, 0
    open_calls: list[tuple[str, int]] = []
    for _ in range(num_requests):
        arrival_s += random.expovariate(rate)
        if len(open_calls) < NUM_AGENTS or random.random() < LONG_SHARE / 4:
            open_calls.append((f"agent-{num_agents}", random.randint(4000, 20_000)))
            num_agents += 1
        place = random.randrange(len(open_calls))
        name, prompt = open_calls[place]
        output = random.randint(30, 400)
        tenant = f"tenant-{int(name.removeprefix('agent-')) % NUM_TENANTS}"
        requests.append(TracedRequest(arrival_s, prompt, output, tenant, name, prompt))
        longer = prompt + output + random.randint(50, 1100)
        if longer > 40_000:
            open_calls.pop(place)
        else:
            open_calls[place] = (name, longer)
    return requests


def flood(rate: float, num_requests: int, seed: int = 1) -> list[TracedRequest]:
    """Chat of others at `rate`, and one tenant that sends 10,000 requests at once before them."""
    random = Random(seed + 1)  # noqa: S311
    queued = [
        TracedRequest(0.0, *_chat_lengths(random, index), FLOODING_TENANT)
        for index in range(FLOOD_REQUESTS)
    ]
    return queued + chat(rate, num_requests, seed)


WORKLOADS: dict[str, Callable[[float, int, int], list[TracedRequest]]] = {
    "chat": chat,
    "mixed": mixed,
    "small": small,
    "agent": agent,
    "flood": flood,
}
"""By name: (requests per second, number of requests, seed) to a trace."""
