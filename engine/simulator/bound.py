"""A mean time to first token below which no scheduler of this machine can come.

LB1: the mean flow time of *preemptive shortest remaining processing time* on one machine, with only
the compute of every prefill as work and an ideal prefix cache. SRPT is optimal for this relaxed problem
(Schrage 1968), and every engine solves a harder one: it also decodes, reads weights and
runs out of memory. LB2: the mean time of every request alone. The bound is the greater of the two
*means*; the greater of each request's would be no bound.
"""

from heapq import heappop, heappush

from engine.simulator.machines import Machine
from engine.simulator.trace import TracedRequest


def mean_ttft_bound_s(
    requests: list[TracedRequest], machine: Machine, num_machines: int = 1
) -> float:
    """Seconds. `num_machines` count as one that is as many times faster: still a bound."""
    cached = ideal_hits(requests)
    work = [
        machine.cost_model.work_s(request.prompt_tokens - hit, hit) / num_machines
        for request, hit in zip(requests, cached, strict=True)
    ]
    alone = [
        machine.alone_s(request.prompt_tokens - hit, hit)
        for request, hit in zip(requests, cached, strict=True)
    ]
    return max(
        srpt_mean_s([request.arrival_s for request in requests], work), sum(alone) / len(alone)
    )


def ideal_hits(requests: list[TracedRequest]) -> list[int]:
    """Prompt tokens of each request that an earlier arrival of its tenant has shown already."""
    known: dict[tuple[str, str], int] = {}
    hits = []
    for request in requests:
        name = (request.tenant, request.prefix)
        most = min(request.prefix_tokens, request.prompt_tokens - 1)
        hits.append(min(most, known.get(name, 0)))
        known[name] = max(known.get(name, 0), request.prefix_tokens)
    return hits


def srpt_mean_s(arrivals_s: list[float], work_s: list[float]) -> float:
    """Mean flow time when the job with the least work left always runs; arrivals in order."""
    left: list[tuple[float, float]] = []
    now, flow, index = 0.0, 0.0, 0
    while index < len(arrivals_s) or left:
        if not left:
            now = max(now, arrivals_s[index])
        while index < len(arrivals_s) and arrivals_s[index] <= now:
            heappush(left, (work_s[index], arrivals_s[index]))
            index += 1
        work, arrival_s = heappop(left)
        until_next = arrivals_s[index] - now if index < len(arrivals_s) else work
        if work <= until_next:
            now += work
            flow += now - arrival_s
        else:
            now = arrivals_s[index]
            heappush(left, (work - until_next, arrival_s))
    return flow / len(arrivals_s)
