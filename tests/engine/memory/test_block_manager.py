"""The block manager under any order of operations, nearly full as the normal case."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.memory.block_manager import BlockManager
from engine.memory.prefix_cache import extend_hash, root_hash

NUM_BLOCKS = 6


class BlockMachine(RuleBasedStateMachine):
    """Block tables of a few sequences; an oracle counts their references by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, 64, is_prefix_cache_on=True)
        self.tables: list[list[int]] = []
        self.named: dict[bytes, int] = {}

    @rule(count=st.integers(1, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        free_before = self.blocks.num_free
        got = self.blocks.allocate(count)
        if count > free_before:
            assert got is None
            return
        assert got is not None
        assert len(set(got)) == count
        held = {block for table in self.tables for block in table}
        assert not held & set(got), "a referenced block was handed out again"
        self.named = {h: block for h, block in self.named.items() if block not in got}
        self.tables.append(got)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.blocks.free(self.tables.pop(index))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.blocks.share(table)
        self.tables.append(list(table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), token=st.integers(0, 5))
    def name(self, data: st.DataObject, token: int) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        block_hash = extend_hash(root_hash("tenant"), np.full(64, token, dtype=np.int32))
        already_named = block in self.named.values()
        self.blocks.name(block, block_hash)
        if block_hash not in self.named and not already_named:
            self.named[block_hash] = block

    @rule(token=st.integers(0, 5))
    def hit(self, token: int) -> None:
        block_hash = extend_hash(root_hash("tenant"), np.full(64, token, dtype=np.int32))
        found = self.blocks.match([block_hash])
        if found:
            assert found == [self.named[block_hash]], "a hash names a block with other content"
            self.blocks.share(found)
            self.tables.append(found)

    @invariant()
    def every_reference_is_counted(self) -> None:
        assert self.blocks.problems(self.tables) == []
        counts = np.bincount(
            [block for table in self.tables for block in table], minlength=NUM_BLOCKS
        )
        assert (counts == self.blocks.ref_counts).all()
        assert self.blocks.num_free == int((counts == 0).sum())


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_planted_leak_is_found() -> None:
    blocks = BlockManager(4, 64, is_prefix_cache_on=True)
    taken = blocks.allocate(2)
    assert taken is not None
    assert blocks.problems([taken]) == []
    assert blocks.problems([taken[:1]]) != []
    blocks.ref_counts[taken[0]] += 1
    assert blocks.problems([taken]) != []


def test_the_least_recently_used_block_is_evicted_and_a_prefix_from_its_tail() -> None:
    blocks = BlockManager(4, 64, is_prefix_cache_on=True)
    tables = [blocks.allocate(2), blocks.allocate(2)]
    names = [bytes([number]) * 16 for number in range(4)]
    for table, pair in zip(tables, (names[:2], names[2:]), strict=True):
        assert table is not None
        for block, name in zip(table, pair, strict=True):
            blocks.name(block, name)
    old, young = tables
    assert old is not None
    assert young is not None
    blocks.free(young)
    blocks.free(old)
    blocks.share(young)
    blocks.free(young)
    assert blocks.allocate(1) == [old[1]]
    assert blocks.match(names[:2]) == old[:1]
    assert blocks.allocate(1) == [old[0]]
    assert blocks.match(names[2:]) == young
