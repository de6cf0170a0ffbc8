"""vLLM behind HTTP: what `HttpDriver` needs to know to speak with it.

Closing its connection is how vLLM is told to abort an attempt, and it frees what the attempt held.
The attempt id is vLLM's request id, so both logs name it alike (vLLM puts `cmpl-` before it).
"""

from typing import Final

from dsched.drivers.base import EngineDescription
from dsched.drivers.http_driver import JSON_HEADERS, EngineRequest, HttpDriver
from dsched.drivers.reports import ReportReader
from dsched.drivers.vllm.protocol import (
    PrefillReader,
    StreamReader,
    encode_request,
    translate_refusal,
)
from dsched.drivers.vllm.watch import VllmInspector
from dsched.drivers.watch import EngineHints
from dsched.drivers.wire import GenerateCommand
from dsched.errors import DriverError
from dsched.ids import AttemptId, EngineId

COMPLETIONS_PATH: Final = "/v1/completions"


class VllmDialect:
    """Implements `Dialect` for vLLM."""

    def __init__(self, *, model: str | None) -> None:
        self._model = model

    def generate(
        self, command: GenerateCommand, description: EngineDescription | None
    ) -> EngineRequest:
        """See `Dialect.generate`. A single rank needs no header, and a server with one refuses
        other ranks."""
        model = self._model if description is None else description.model
        headers = [*JSON_HEADERS]
        if description is not None and description.num_dp_ranks > 1:
            headers.append((b"x-data-parallel-rank", b"%d" % command.dp_rank))
        body = encode_request(command, model=model)
        return EngineRequest(path=COMPLETIONS_PATH, body=body, headers=headers)

    def abort(self, attempt_id: AttemptId) -> None:
        """The closed connection says it all."""

    def reader(self, command: GenerateCommand) -> StreamReader:
        """See `Dialect.reader`."""
        make_reader = PrefillReader if command.is_prefill else StreamReader
        return make_reader(has_logprobs=command.sampling.logprobs is not None)

    def translate_refusal(self, status: int, body: bytes) -> DriverError:
        """See `Dialect.translate_refusal`."""
        return translate_refusal(status, body)


class VllmDriver(HttpDriver):
    """Implements `Driver` for a vLLM server at a URL."""

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
            dialect=VllmDialect(model=model),
            inspector=VllmInspector(),
            model=model,
            hints=hints,
            reports=reports,
            step_budget_ns=step_budget_ns,
        )
