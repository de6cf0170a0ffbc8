"""Faults: what is recorded so that a lost engine costs its clients a pause and nothing else."""

from dsched.faults.journal import (
    AttemptRecord,
    JournalStatus,
    MemoryJournal,
    RequestRecord,
    TokenJournal,
)
from dsched.faults.journal_file import SqliteJournal, read_unfinished
from dsched.faults.recovery import (
    RecoveryGuarantee,
    RecoveryMethod,
    RecoveryPlan,
    plan_recovery,
)

__all__ = [
    "AttemptRecord",
    "JournalStatus",
    "MemoryJournal",
    "RecoveryGuarantee",
    "RecoveryMethod",
    "RecoveryPlan",
    "RequestRecord",
    "SqliteJournal",
    "TokenJournal",
    "plan_recovery",
    "read_unfinished",
]
