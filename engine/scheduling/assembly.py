"""From settings to a scheduler: one way for the engine and for the simulator."""

from dataclasses import replace

from engine.cost_model import affordable_tokens
from engine.memory.block_manager import BlockManager
from engine.messages import CostModel
from engine.scheduling.plan import Limits
from engine.scheduling.planner import PlanFunction, plan
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.slots import SlotTable
from engine.settings import EngineSettings
from engine.speculation.speculator import Speculator

BLOCK_SIZE = 64
"""Tokens of a KV block."""


def create_scheduler(
    settings: EngineSettings,
    *,
    num_blocks: int,
    context_length: int,
    cost_model: CostModel | None,
    policy: PlanFunction = plan,
    is_whole: bool = False,
    speculator: Speculator | None = None,
) -> Scheduler:
    """A scheduler with empty queues over `num_blocks` free blocks.

    `is_whole`: its model computes a prompt in one step, and no part of one.
    """
    blocks = BlockManager(num_blocks, BLOCK_SIZE, is_prefix_cache_on=settings.is_prefix_cache_on)
    max_blocks = min(blocks.blocks_for(context_length), num_blocks)
    slots = SlotTable(settings.max_running, max_blocks)
    limits = replace(limits_of(settings, cost_model), is_whole=is_whole)
    return Scheduler(blocks, slots, limits, cost_model, policy=policy, speculator=speculator)


def limits_of(settings: EngineSettings, cost_model: CostModel | None) -> Limits:
    """The balance of one step, as the planner takes it."""
    return Limits(
        block_size=BLOCK_SIZE,
        max_step_tokens=settings.max_step_tokens,
        untimed_step_tokens=_untimed_step_tokens(settings, cost_model),
        step_s=settings.step_s,
        idle_step_s=settings.idle_step_s,
        gap_s=settings.gap_s,
        pace_s=settings.pace_s,
        ride_share=settings.ride_share,
        crowded_share=settings.crowded_share,
        prefill_share=settings.prefill_share,
        paused_share=settings.paused_share,
        backfill_lock_s=settings.backfill_lock_s,
        num_kept_slots=int(settings.kept_slots_share * settings.max_running),
    )


def _untimed_step_tokens(settings: EngineSettings, cost_model: CostModel | None) -> int:
    """What to count when seconds cannot be predicted: the tokens that once fitted into a step."""
    most = settings.max_step_tokens
    if cost_model is None:
        return most
    seconds = settings.step_s - cost_model.base_s
    fitting = affordable_tokens(cost_model, seconds, num_before=0, num_cached=0, most=most)
    return max(BLOCK_SIZE, fitting)
