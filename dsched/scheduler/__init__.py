"""One step of one DP rank: which requests run, with how many tokens, within a time budget.

`plan_chunks` divides a step; `StepPlanner` keeps the state of a rank and plans each step while the
device computes the one before.
"""

from dsched.scheduler.chunking import ChunkPlan, ChunkRule, plan_chunks
from dsched.scheduler.planner import StepPlan, StepPlanner

__all__ = ["ChunkPlan", "ChunkRule", "StepPlan", "StepPlanner", "plan_chunks"]
