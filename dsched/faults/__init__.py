"""Faults: what is recorded so that a lost engine costs its clients a pause and nothing else."""

from dsched.faults.journal import (
    AttemptRecord,
    JournalStatus,
    MemoryJournal,
    RequestRecord,
    TokenJournal,
)
from dsched.faults.journal_file import SqliteJournal, read_unfinished

__all__ = [
    "AttemptRecord",
    "JournalStatus",
    "MemoryJournal",
    "RequestRecord",
    "SqliteJournal",
    "TokenJournal",
    "read_unfinished",
]
