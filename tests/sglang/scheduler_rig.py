"""A real SGLang scheduler in this process, fed step by step; for scripts of the tests.

Runs in the Python of the SGLang environment. It is SGLang's `Scheduler` with its model, cache and
event loop; only the processes around it (HTTP server, tokenizer, detokenizer) are missing: requests
come from `feed`, and answers are read from SGLang's request objects. So it starts in a third of the
time of a server, and every step can be looked at.
"""

import os
from array import array
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "max_total_tokens": 65_536,
    "max_running_requests": 64,
    "chunked_prefill_size": 1_024,
    "mem_fraction_static": 0.3,
    "skip_tokenizer_init": True,
    "log_level": "warning",
}


class SchedulerRig:
    """One scheduler. `serve` runs its own event loop until everything that was fed has ended."""

    def __init__(self, model: str, **arguments: Any) -> None:
        from sglang.srt.managers import scheduler as module
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, prepare_server_args

        load_plugins()
        given = {"model_path": model, **ARGUMENTS, **arguments}
        server_args = prepare_server_args(list(command_line(given)))
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        self.scheduler: Any = module.Scheduler(server_args, PortArgs.init_new(server_args))
        self.requests: dict[str, Any] = {}
        """SGLang's request objects by id, in order of arrival."""
        self.steps: list[dict[str, Any]] = []
        """What each step ran: `kind`, and `chunks` by request id."""
        self._fed: list[tuple[int, Any]] = []
        scheduler = self.scheduler
        self._queue, self._run = scheduler._add_request_to_queue, scheduler.run_batch
        scheduler._add_request_to_queue = self._note_request
        scheduler.run_batch = self._note_step
        scheduler.ingest_requests = self._ingest

    def feed(self, rid: str, prompt: list[int], max_tokens: int, at_step: int = 0) -> None:
        """Let a request arrive before the step of this number (from the start of `serve`)."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=max_tokens, temperature=0, ignore_eos=True)
        sampling.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=rid,
            input_text="",
            input_ids=array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
        self._fed.append((at_step, request))

    def serve(self) -> dict[str, list[int]]:
        """Run until all have ended; return their tokens by id. Forgets older steps."""
        self.steps.clear()
        self.requests.clear()
        self._fed.sort(key=lambda each: each[0])
        self.scheduler.gracefully_exit = False
        # The class's own: after the loop of the object dsched's agent says goodbye.
        type(self.scheduler).run_event_loop(self.scheduler)
        return {rid: list(request.output_ids) for rid, request in self.requests.items()}

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self.scheduler.flush_cache()

    def _ingest(self, *_: Any, **__: Any) -> list[Any]:
        now = len(self.steps)
        if self._fed and self.scheduler.is_fully_idle():
            # Nothing runs that could count the steps until then.
            now = max(now, self._fed[0][0])
        due = [request for step, request in self._fed if step <= now]
        self._fed = [(step, request) for step, request in self._fed if step > now]
        self.scheduler.process_input_requests(due)
        if not self._fed and not due and self.scheduler.is_fully_idle():
            self.scheduler.gracefully_exit = True
        return due

    def _note_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.requests[request.rid] = request
        return self._queue(request, *args, **kwargs)

    def _note_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        is_prefill = batch.forward_mode.is_extend()
        decoding = batch.reqs if not is_prefill else batch.decoding_reqs or ()
        chunks = {req.rid: req.extend_len for req in batch.reqs} if is_prefill else {}
        self.steps.append(
            {
                "kind": "prefill" if is_prefill else "decode",
                "chunks": chunks | {req.rid: 1 for req in decoding},
            }
        )
        return self._run(batch, *args, **kwargs)


def command_line(arguments: dict[str, Any]) -> list[str]:
    """Write arguments as SGLang's own command line has them."""
    words: list[str] = []
    for name, value in arguments.items():
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(str(value))
    return words
