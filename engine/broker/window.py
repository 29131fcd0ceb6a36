"""How many requests a worker holds beyond those that run: the only thing it decides about the queue."""

from dataclasses import dataclass

SPARE_SHARE = 0.25
"""Of the window, beyond it: for tenants that have nothing waiting in it yet."""


@dataclass(frozen=True, slots=True)
class TakeRoom:
    """What a worker may take now."""

    for_any: int
    """Requests of the tenants that were served least, whoever they are."""
    for_others: int
    """Further ones, one each, of tenants that have none waiting in the worker."""

    @property
    def is_any(self) -> bool:
        """Whether anything may be taken at all."""
        return self.for_any + self.for_others > 0


NO_ROOM = TakeRoom(0, 0)


def take_room(*, num_waiting: int, num_held: int, max_running: int, take_window: int) -> TakeRoom:
    """Requests that may be taken now: a window that can soon start, never the whole queue.

    One tenant's requests may fill the window and then stand there for as long as memory is scarce, so
    a spare part of it stays open to the others. `num_waiting` of the `num_held` taken requests have
    no KV blocks, as of the worker's last step.
    """
    num_beyond = max(num_waiting, num_held - max_running)
    for_any = max(0, take_window - num_beyond)
    whole = take_window + max(1, int(SPARE_SHARE * take_window))
    return TakeRoom(for_any, max(0, whole - num_beyond - for_any))
