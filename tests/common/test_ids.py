from common.ids import new_id


def test_ids_are_distinct_and_carry_their_prefix() -> None:
    ids = {new_id("req") for _ in range(1000)}
    assert len(ids) == 1000
    assert all(identifier.startswith("req_") and len(identifier) == 30 for identifier in ids)


def test_ids_sort_by_creation_time(monkeypatch) -> None:
    times = iter([1_000_000_000, 2_000_000_000, 3_000_000_000_000_000])
    monkeypatch.setattr("common.ids.time.time_ns", lambda: next(times))
    ids = [new_id("req") for _ in range(3)]
    assert ids == sorted(ids)
