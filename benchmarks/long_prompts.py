"""What a chat that grows costs in front of the engine: CPU per request, added latency, their parts.

Every turn sends the whole conversation again, as chats and agents do, through `dsched run` as it
ships to a dummy engine that answers at once. `ours` is with the token cache, the peer `whole` with
`front_door.token_cache_bytes: 0`, which tokenises every prompt whole. Each repeat is another chat
under the same system prompt. CPU is that of dsched's own process, all threads, and the mean over
the turns of a chat; added latency is to the first byte of the answer, beside the same bytes sent to
the engine itself, the median over the second half of the turns.

The tokenizer is a byte-level BPE with the special tokens and the splitting of Qwen's, trained here
on sources of Python's standard library; messages are other sources of it. The parts are timed one
by one, in this process, for the middle turn of the last chat, whose prompt is about the mean one;
the rest is what is left of a request's CPU: HTTP, routing, the journal's file, the answer.
"""

import contextlib
import http.client
import json
import statistics
import sys
import sysconfig
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _report import Row, arguments, half_quartile_range, report
from frontdoor import RIG, Target, free_port, running, wait_until_served
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from dsched.drivers.vllm.protocol import encode_request
from dsched.drivers.wire import GenerateCommand, SamplingParams
from dsched.frontdoor.renderer import TemplateRenderer, encode_prompt, load_tokenizer
from dsched.frontdoor.schema import parse_chat
from dsched.frontdoor.token_cache import PromptEncoder, TokenCache
from dsched.ids import AttemptId, DpRank

VOCAB_SIZE = 16_000
TRAINING_CHARS, MESSAGE_CHARS = 3_000_000, 6_000_000
CASES = {"8k": (8_000, 10), "100k": (100_000, 40)}
"""Tokens of the last turn's prompt, and turns."""
SYSTEM_SHARE = 0.1
"""Of the last prompt: instructions and tools of the service, the same in every chat."""
MAX_CHARS_PER_TOKEN = 6
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> "
    "<|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> "
    "<|image_pad|> <|video_pad|>"
)
TOKENISE = "look up, tokenise what is new"
CACHE_BYTES = 128 * 1024 * 1024


def sources() -> Iterator[str]:
    """Yield files of the standard library, in order of their names."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="ignore")


def take(texts: Iterator[str], num_chars: int) -> str:
    """Return as many of `texts` as have `num_chars` together."""
    taken, num_taken = [], 0
    for text in texts:
        taken.append(text)
        num_taken += len(text)
        if num_taken >= num_chars:
            break
    return "".join(taken)[:num_chars]


def train_tokenizer(corpus: str, path: Path) -> None:
    """Write a tokenizer in the shape of Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([corpus], trainer)
    tokens = [AddedToken(text, special=True, normalized=False) for text in QWEN_TOKENS.split()]
    tokenizer.add_special_tokens(tokens)
    texts = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    tokenizer.save(str(path))


@dataclass(slots=True)
class Chats:
    """Chats of one length, each a list of the bodies of its turns."""

    texts: str
    tokenizer: Tokenizer
    place: int = 0

    def words(self, num_tokens: int) -> str:
        """Return about `num_tokens` of text that no chat had before, as long as there is any."""
        num_chars = num_tokens * MAX_CHARS_PER_TOKEN
        if self.place + num_chars > len(self.texts):
            self.place = 0
        text = self.texts[self.place : self.place + num_chars]
        # Sources differ in characters a token.
        share = min(1.0, num_tokens / len(encode_prompt(self.tokenizer, text)))
        text = text[: int(len(text) * share)]
        self.place += len(text)
        return text

    def bodies(self, system: str, *, num_tokens: int, num_turns: int) -> list[bytes]:
        """Return the request of every turn: a tool's long answer or a question, and an answer."""
        messages = [{"role": "system", "content": system}]
        per_turn = int(num_tokens * (1 - SYSTEM_SHARE)) // num_turns
        bodies = []
        for _ in range(num_turns):
            messages.append({"role": "user", "content": self.words(per_turn * 3 // 4)})
            body = {"model": "tiny", "messages": messages, "max_tokens": 1}
            bodies.append(json.dumps(body).encode())
            messages.append({"role": "assistant", "content": self.words(per_turn // 4)})
        return bodies


@dataclass(slots=True)
class Measured:
    """One target's figures for one length of chats."""

    cpu_ms: list[float] = field(default_factory=list)
    first_byte_ms: list[float] = field(default_factory=list)


def cpu_ms(target: Target) -> float:
    """CPU time of all threads so far; the kernel's scheduler counts in nanoseconds."""
    assert target.process is not None
    total_ns = 0
    for path in Path(f"/proc/{target.process.pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total_ns += int(path.read_text().split()[0])
    return total_ns / 1e6


def send(port: int, path: str, bodies: list[bytes]) -> list[float]:
    """Send one body after the other; return the milliseconds to the first byte of each answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    taken_ms = []
    for body in bodies:
        start_s = time.perf_counter()
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        taken_ms.append((time.perf_counter() - start_s) * 1e3)
        answer = response.read()
        if response.status != 200:
            raise SystemExit(f"status {response.status}: {answer[:500]!r}")
    connection.close()
    return taken_ms


def measure(target: Target, engine_port: int, bodies: list[bytes], into: Measured) -> None:
    """Send the turns of a chat to a target, then the same bytes to the engine."""
    before_ms = cpu_ms(target)
    taken_ms = send(target.port, "/v1/chat/completions", bodies)
    into.cpu_ms.append((cpu_ms(target) - before_ms) / len(bodies))
    direct_ms = send(engine_port, "/v1/completions", bodies)
    half = len(bodies) // 2
    into.first_byte_ms.append(
        statistics.median(taken_ms[half:]) - statistics.median(direct_ms[half:])
    )


def config_of(folder: Path, tokenizer: Path, port: int, engine: int, *, cache_bytes: int) -> Path:
    """Write the configuration of a `dsched run` in a folder of its own."""
    folder.mkdir()
    config: dict[str, Any] = {
        "state_dir": str(folder),
        "front_door": {"port": port, "token_cache_bytes": cache_bytes},
        "admin": {"port": 0},
        "logging": {"level": "error"},
        "agent": {"endpoint": f"tcp://127.0.0.1:{free_port()}"},
        "pools": {
            "default": {
                "model": {"name": "tiny", "tokenizer": str(tokenizer)},
                "engines": [
                    {
                        "kind": "vllm",
                        "url": f"http://127.0.0.1:{engine}",
                        "max_running_requests": 256,
                        "kv_capacity_tokens": 1 << 30,
                    }
                ],
            }
        },
    }
    path = folder / "dsched.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def best_ms(function: Callable[[], object], *, repeats: int) -> float:
    """Return the shortest of some times: what the work takes where nobody disturbs it."""
    taken_s = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        function()
        taken_s.append(time.perf_counter() - start_s)
    return min(taken_s) * 1e3


def measure_parts(tokenizer: Tokenizer, data: bytes, *, repeats: int) -> dict[str, float]:
    """Return what the parts of a turn take, in milliseconds, where the turns before were seen."""
    whole = TemplateRenderer(tokenizer)
    cached = TemplateRenderer(tokenizer, cache=TokenCache(CACHE_BYTES))
    body = parse_chat(data)
    ids = cached.render_chat(body).token_ids
    if ids != whole.render_chat(body).token_ids:
        raise SystemExit("the token cache gave other ids")
    text = "".join(f"<|im_start|>{each.role}\n{each.content}<|im_end|>\n" for each in body.messages)
    seen = PromptEncoder(tokenizer, cache=TokenCache(CACHE_BYTES))
    seen.encode(text, add_special_tokens=False)

    def last_turn() -> float:
        """Tokenise the turn where the one before has been seen: two messages are new."""
        encoder = PromptEncoder(tokenizer, cache=TokenCache(CACHE_BYTES))
        encoder.encode(text[: text.rindex("<|im_start|>assistant")], add_special_tokens=False)
        start_s = time.perf_counter()
        encoder.encode(text, add_special_tokens=False)
        return (time.perf_counter() - start_s) * 1e3

    command = GenerateCommand(
        attempt_id=AttemptId("a"),
        epoch=1,
        dp_rank=DpRank(0),
        prompt_token_ids=tuple(ids),
        sampling=SamplingParams(max_tokens=1),
    )
    lookup_ms = best_ms(lambda: seen.encode(text, add_special_tokens=False), repeats=repeats)
    render_ms = best_ms(lambda: cached.render_chat(body), repeats=repeats)
    return {
        "read the JSON": best_ms(lambda: parse_chat(data), repeats=repeats),
        "template, control tokens": render_ms - lookup_ms,
        TOKENISE: min(last_turn() for _ in range(3)),
        "ids as a tuple": best_ms(lambda: tuple(ids), repeats=repeats),
        "JSON to the engine": best_ms(lambda: encode_request(command, model="m"), repeats=repeats),
        "ids for the journal": best_ms(lambda: array("i", ids).tobytes(), repeats=repeats),
    }


def measure_whole(tokenizer: Tokenizer, data: bytes) -> tuple[float, int]:
    """Return what it takes to render and tokenise a turn whole, in milliseconds, and its tokens."""
    renderer, body = TemplateRenderer(tokenizer), parse_chat(data)
    num_tokens = len(renderer.render_chat(body).token_ids)
    return best_ms(lambda: renderer.render_chat(body), repeats=3), num_tokens


def main() -> None:
    """Run and report."""
    given = arguments(__doc__.partition("\n")[0]).parse_args()
    repeats = 2 if given.quick else 6
    rows: list[Row] = []
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsched-bench-")))
        texts = sources()
        path = folder / "tokenizer.json"
        train_tokenizer(take(texts, TRAINING_CHARS), path)
        tokenizer = load_tokenizer(path)
        chats = Chats(take(texts, MESSAGE_CHARS), tokenizer)

        engine = free_port()
        command = [sys.executable, RIG, "backend", engine]
        stack.enter_context(running(command, folder / "engine.log"))
        targets = {}
        for name, cache_bytes in (("ours", CACHE_BYTES), ("whole", 0)):
            port = free_port()
            config = config_of(folder / name, path, port, engine, cache_bytes=cache_bytes)
            run = [sys.executable, "-m", "dsched.cli.main", "run", "-c", config, "--quiet"]
            log = folder / f"{name}.log"
            targets[name] = Target(name, port, stack.enter_context(running(run, log)))
            if not wait_until_served(port):
                raise SystemExit(f"{name} does not serve:\n{log.read_text()[-2000:]}")
        for case, (num_tokens, num_turns) in CASES.items():
            system = chats.words(int(num_tokens * SYSTEM_SHARE))
            measured = {name: Measured() for name in targets}
            for _ in range(repeats):
                bodies = chats.bodies(system, num_tokens=num_tokens, num_turns=num_turns)
                for name, target in targets.items():
                    measure(target, engine, bodies, measured[name])
            rows += rows_of(case, measured)
            middle = bodies[num_turns // 2]
            parts = measure_parts(tokenizer, middle, repeats=5 if given.quick else 20)
            parts["the rest"] = rows[-2].ours - sum(parts.values())
            whole_ms, middle_tokens = measure_whole(tokenizer, middle)
            _, last_tokens = measure_whole(tokenizer, bodies[-1])
            notes.append(f"{case}: {middle_tokens:,} tokens in the middle, {last_tokens:,} at last")
            rows += [
                Row(
                    metric="part_ms",
                    case=f"{case}: {part}",
                    ours=value,
                    better="lower",
                    peers={"whole": whole_ms} if part == TOKENISE else {},
                )
                for part, value in parts.items()
            ]
    report("long_prompts", rows, seeds=repeats, json_path=given.json)
    print("prompts of the last chats:", "; ".join(notes))


def rows_of(case: str, measured: dict[str, Measured]) -> list[Row]:
    """Return the figures of both targets."""
    ours, whole = measured["ours"], measured["whole"]
    return [
        Row(
            metric=metric,
            case=case,
            ours=statistics.median(getattr(ours, attribute)),
            spread=half_quartile_range(getattr(ours, attribute)),
            better="lower",
            peers={"whole": statistics.median(getattr(whole, attribute))},
        )
        for metric, attribute in (
            ("cpu_ms_per_request", "cpu_ms"),
            ("added_first_byte_ms", "first_byte_ms"),
        )
    ]


if __name__ == "__main__":
    main()
