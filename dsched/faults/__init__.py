"""Faults: what is recorded so that a lost engine costs its clients a pause and nothing else."""

from dsched.faults.journal import (
    AttemptRecord,
    JournalStatus,
    MemoryJournal,
    RequestRecord,
    TokenJournal,
)
from dsched.faults.journal_file import SqliteJournal, read_unfinished
from dsched.faults.membership import EngineSpec, Membership, MembershipView, PoolSpec
from dsched.faults.ration import LostRequest, RationPlan, RationView, plan_ration
from dsched.faults.recovery import (
    RecoveryGuarantee,
    RecoveryMethod,
    RecoveryPlan,
    plan_recovery,
)
from dsched.faults.resume import ResumeKind, ResumePlan, plan_resume
from dsched.faults.spare import GroupCapacity, SparePlan, plan_spare

__all__ = [
    "AttemptRecord",
    "EngineSpec",
    "GroupCapacity",
    "JournalStatus",
    "LostRequest",
    "Membership",
    "MembershipView",
    "MemoryJournal",
    "PoolSpec",
    "RationPlan",
    "RationView",
    "RecoveryGuarantee",
    "RecoveryMethod",
    "RecoveryPlan",
    "RequestRecord",
    "ResumeKind",
    "ResumePlan",
    "SparePlan",
    "SqliteJournal",
    "TokenJournal",
    "plan_ration",
    "plan_recovery",
    "plan_resume",
    "plan_spare",
    "read_unfinished",
]
