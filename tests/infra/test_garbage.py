"""Garbage is found, when nobody waits at the latest; what is in use is looked at once."""

import subprocess
import sys

SET_UP = """
import asyncio, gc, weakref
from infra import garbage

class Node:
    def __init__(self):
        self.me = self

garbage.INTERVAL_S = 0.01
is_idle = False
collector = garbage.Collector(is_idle=lambda: is_idle)

async def found(reference, rounds=30):
    for _ in range(rounds):
        await asyncio.sleep(0.01)
        if reference() is None:
            return True
    return False
"""


def told(body: str) -> list[str]:
    """What a process of its own prints: the collector is the whole process's."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    code = f"{SET_UP}\nasync def main():\n    global is_idle\n{lines}\nasyncio.run(main())"
    run = [sys.executable, "-c", code]
    return subprocess.run(
        run, check=True, timeout=60, capture_output=True, text=True
    ).stdout.split()


def test_what_start_up_has_made_is_set_aside_until_the_end() -> None:
    body = """
import infra.asgi
collector.start()
print(gc.isenabled(), gc.get_freeze_count() > 100_000, len(gc.get_objects()) < 1_000)
collector.stop()
print(gc.isenabled(), gc.get_freeze_count())
"""
    assert told(body) == ["False", "True", "True", "True", "0"]


def test_a_cycle_that_ends_at_once_is_found_while_others_wait() -> None:
    body = """
collector.start()
reference = weakref.ref(Node())
print(await found(reference))
"""
    assert told(body) == ["True"]


def test_a_cycle_that_was_set_aside_is_found_when_nobody_waits() -> None:
    body = """
garbage.SET_ASIDE_IDLE = 0
collector.start()
node = Node()
await asyncio.sleep(0.05)
reference = weakref.ref(node)
kept = [[] for _ in range(100)]
del node
print(await found(reference))
is_idle = True
print(await found(reference, rounds=garbage.QUIET_TICKS // 2))
print(await found(reference))
"""
    assert told(body) == ["False", "False", "True"]


def test_too_much_that_was_set_aside_is_looked_at_whoever_waits() -> None:
    body = """
garbage.SET_ASIDE_MAX = 1_000
collector.start()
node = Node()
await asyncio.sleep(0.05)
reference = weakref.ref(node)
del node
print(await found(reference))
kept = [[] for _ in range(5_000)]
print(await found(reference))
"""
    assert told(body) == ["False", "True"]
