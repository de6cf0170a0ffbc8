"""The decision trace: what planners saw and decided, kept in a ring, told and decided again."""

from dsched.trace.files import TraceReader, TraceWriter, hash_of
from dsched.trace.recorder import Recorder, RingRecorder, null_recorder
from dsched.trace.records import FORMAT_VERSION, AnyRecord, Header
from dsched.trace.replay import Changes, Difference, ReplayResult, replay
from dsched.trace.story import Story, as_document, newest_request_ids, tell
from dsched.trace.text import as_text

__all__ = [
    "FORMAT_VERSION",
    "AnyRecord",
    "Changes",
    "Difference",
    "Header",
    "Recorder",
    "ReplayResult",
    "RingRecorder",
    "Story",
    "TraceReader",
    "TraceWriter",
    "as_document",
    "as_text",
    "hash_of",
    "newest_request_ids",
    "null_recorder",
    "replay",
    "tell",
]
