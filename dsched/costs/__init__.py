"""How long a step takes: models of prefill chunks, decode steps and verify batches.

Fitted from measured steps, updated online, read from and written to the tables that engines keep.
Everything that plans by time takes its seconds from here.
"""

from dsched.costs.curve import StepCostCurve
from dsched.costs.decode import DecodeCostModel
from dsched.costs.prefill import PrefillCostModel

__all__ = ["DecodeCostModel", "PrefillCostModel", "StepCostCurve"]
