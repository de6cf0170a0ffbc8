"""How many draft tokens to verify: DSpark's confidence-scheduled verification for a whole EP group.

`plan_verify_lengths` decides; the rest keeps what it decides by true: calibrated confidences,
acceptance statistics, and one budget for all ranks of a group.
"""

from dsched.spec_decode.calibration import fit_temperatures
from dsched.spec_decode.lengths import ContextCost, VerifyMode, VerifyPlan, plan_verify_lengths

__all__ = [
    "ContextCost",
    "VerifyMode",
    "VerifyPlan",
    "fit_temperatures",
    "plan_verify_lengths",
]
