"""The two scheduler classes for `vllm serve --scheduler-cls`.

vLLM takes one class for a mode: with asynchronous scheduling (its default on GPUs) a subclass of
`Scheduler` would switch that off, and a subclass of `AsyncScheduler` needs it. So there are two
classes over the same mixins; the mixins hold everything.
"""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from dsched.drivers.vllm.chunking import ChunkingMixin
from dsched.drivers.vllm.verify import VerifyLengthMixin


class DschedScheduler(VerifyLengthMixin, ChunkingMixin, Scheduler):  # type: ignore[misc]
    """vLLM's `Scheduler`, reporting to dsched. For engines without asynchronous scheduling."""


class DschedAsyncScheduler(VerifyLengthMixin, ChunkingMixin, AsyncScheduler):  # type: ignore[misc]
    """vLLM's `AsyncScheduler`, reporting to dsched. For engines with asynchronous scheduling."""

    _dsched_is_async = True
