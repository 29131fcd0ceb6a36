"""What if: the real planner, scheduler and queue, with a cost model as the clock. No tensors."""
