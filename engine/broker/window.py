"""How many requests a worker holds beyond those that run: the only thing it decides about the queue."""


def take_room(*, num_waiting: int, num_held: int, max_running: int, take_window: int) -> int:
    """Requests that may be taken now: a window that can soon start, never the whole queue.

    `num_waiting` of the `num_held` taken requests have no KV blocks, as of the worker's last step.
    """
    if num_held >= max_running + take_window:
        return 0
    return max(0, take_window - max(num_waiting, num_held - max_running))
