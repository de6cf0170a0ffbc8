"""SGLang behind HTTP: what `HttpDriver` needs to know to speak with it.

An abort closes the connection and names the attempt at `/abort_request` as well: a server that
noticed the closed connection late would compute on for seconds. The attempt id, with a sign at its
end, is SGLang's `rid`, so both logs name a request alike.
"""

from typing import Final

import structlog

from dsched.drivers.base import EngineDescription
from dsched.drivers.http_driver import EngineRequest, HttpDriver
from dsched.drivers.reports import ReportReader
from dsched.drivers.sglang.protocol import (
    SglangReader,
    encode_abort,
    encode_request,
    translate_refusal,
)
from dsched.drivers.sglang.watch import SglangInspector
from dsched.drivers.watch import EngineHints
from dsched.drivers.wire import GenerateCommand
from dsched.errors import DriverError, EngineRefusedError
from dsched.ids import AttemptId, EngineId

GENERATE_PATH: Final = "/generate"
ABORT_PATH: Final = "/abort_request"

log = structlog.get_logger(__name__)


class SglangDialect:
    """Implements `Dialect` for SGLang."""

    def __init__(self, *, engine_id: EngineId) -> None:
        self.num_misrouted = 0
        """Answers that came from another DP rank than the one that was named."""
        self._engine_id = engine_id

    def generate(
        self, command: GenerateCommand, description: EngineDescription | None
    ) -> EngineRequest:
        """See `Dialect.generate`. The rank is named where there are several."""
        dp_rank = None
        if description is not None:
            check_vocabulary(command.prompt_token_ids, vocab_size=description.vocab_size)
            dp_rank = command.dp_rank if description.num_dp_ranks > 1 else None
        return EngineRequest(path=GENERATE_PATH, body=encode_request(command, dp_rank=dp_rank))

    def abort(self, attempt_id: AttemptId) -> EngineRequest:
        """See `Dialect.abort`."""
        return EngineRequest(path=ABORT_PATH, body=encode_abort(attempt_id))

    def reader(self, command: GenerateCommand) -> SglangReader:
        """See `Dialect.reader`."""
        sampling = command.sampling
        return SglangReader(
            has_logprobs=sampling.logprobs is not None,
            cut_at=frozenset(sampling.stop_token_ids if sampling.ignore_eos else ()),
            on_dp_rank=lambda dp_rank: self._check_rank(dp_rank, wanted=command.dp_rank),
        )

    def _check_rank(self, dp_rank: int, *, wanted: int) -> None:
        """Say once that the engine, or something before it, routes by itself."""
        if dp_rank == wanted:
            return
        self.num_misrouted += 1
        if self.num_misrouted == 1:
            log.warning(
                "rank.ignored", engine_id=self._engine_id, dp_rank=dp_rank, wanted_dp_rank=wanted
            )

    def translate_refusal(self, status: int, body: bytes) -> DriverError:
        """See `Dialect.translate_refusal`."""
        return translate_refusal(status, body)


class SglangDriver(HttpDriver):
    """Implements `Driver` for an SGLang server at a URL."""

    def __init__(
        self,
        *,
        engine_id: EngineId,
        url: str,
        model: str | None = None,
        hints: EngineHints | None = None,
        reports: ReportReader | None = None,
        step_budget_ns: int | None = None,
    ) -> None:
        """Connect to nothing yet; see `HttpDriver`."""
        super().__init__(
            engine_id=engine_id,
            url=url,
            dialect=SglangDialect(engine_id=engine_id),
            inspector=SglangInspector(),
            model=model,
            hints=hints,
            reports=reports,
            step_budget_ns=step_budget_ns,
        )


def check_vocabulary(token_ids: tuple[int, ...], *, vocab_size: int | None) -> None:
    """Refuse a prompt that SGLang would compute and die of.

    Raises:
        EngineRefusedError: a token id outside of the vocabulary, as far as its size is known.
    """
    if vocab_size is None or not token_ids:
        return
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise EngineRefusedError(
            400, f"token id {wrong} is not among the {vocab_size} of the vocabulary"
        )
