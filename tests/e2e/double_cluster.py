"""A whole dsched in this process: front door, controller, vLLM drivers, over engine doubles."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import openai

from dsched.cli.service import Service
from dsched.config import Config
from dsched.config_load import LoadedConfig
from dsched.drivers.http import HttpPool
from dsched.drivers.local import free_port
from dsched.sim.tokenizer import CHAT_TEMPLATE, build_sim_tokenizer
from dsched.testing.engine_double import DoubleModel, EngineDouble
from dsched.testing.vllm_double import VllmDouble

Double = TypeVar("Double", bound=EngineDouble)

MODEL = "tiny"
PROMPT = list(range(40, 60))


class Cluster:
    """Doubles, dsched over them, and a client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = DoubleModel()
        self.doubles: list[EngineDouble] = []
        self.services: list[Service] = []
        self.agent_port = free_port()
        self._clients: dict[str, openai.AsyncOpenAI] = {}

    @property
    def agent_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.agent_port}"

    @property
    def service(self) -> Service:
        return self.services[-1]

    @property
    def url(self) -> str:
        return self.service.front_door_url

    @property
    def client(self) -> openai.AsyncOpenAI:
        """The official client of the service started last."""
        if self.url not in self._clients:
            self._clients[self.url] = openai.AsyncOpenAI(
                base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60.0
            )
        return self._clients[self.url]

    async def add_double(self, *, has_agent: bool = True, **options: Any) -> VllmDouble:  # noqa: ANN401
        """Start a vLLM double, engine `p-0` and so on in order."""
        return await self.add(VllmDouble, has_agent=has_agent, **options)

    async def add(self, make: type[Double], *, has_agent: bool = True, **options: Any) -> Double:  # noqa: ANN401
        """Start a double of any kind; see `add_double`."""
        endpoint = self.agent_endpoint if has_agent else None
        fields = {"engine_id": f"p-{len(self.doubles)}", "agent_endpoint": endpoint} | options
        double = make(**fields)
        await double.start()
        self.doubles.append(double)
        return double

    async def start_service(
        self, *, urls: Sequence[str] | None = None, **changes: object
    ) -> Service:
        """Start dsched over the doubles, or over `urls`."""
        tokenizer = self.folder / "tokenizer.json"
        if not tokenizer.exists():
            build_sim_tokenizer().save(str(tokenizer))
            (self.folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        engines = [{"url": double.url, "kind": double.kind} for double in self.doubles]
        if urls is not None:
            engines = [{"url": url, "kind": "vllm"} for url in urls]
        document: dict[str, object] = {
            "state_dir": str(self.folder / f"state-{len(self.services)}"),
            "front_door": {"port": 0, "stop_grace_s": 1.0},
            "admin": {"port": 0},
            "agent": {"endpoint": self.agent_endpoint},
            "debug": {"validate": True},
            "pools": {
                "p": {
                    "model": {"name": MODEL, "tokenizer": str(self.folder)},
                    "engines": engines,
                }
            },
        }
        config = msgspec.convert(document | changes, Config)
        service = Service(LoadedConfig(config=config, origins={}))
        await service.start()
        self.services.append(service)
        return service

    async def wait_until(self, is_so: Callable[[], object], *, timeout_s: float = 10.0) -> None:
        """Give the cluster time; fail loudly when it takes too long."""
        async with asyncio.timeout(timeout_s):
            while not is_so():
                await asyncio.sleep(0.01)

    async def wait_until_up(
        self, count: int | None = None, *, service: Service | None = None
    ) -> None:
        """Wait until `count` engines are up, by default all."""
        controller = (service or self.service).controller
        wanted = len(self.doubles) if count is None else count

        def num_up() -> int:
            statuses = controller.engine_statuses()
            return sum(status.state.name == "UP" for status in statuses)

        await self.wait_until(lambda: num_up() == wanted)

    async def get(self, path: str, *, base: str | None = None) -> tuple[int, bytes]:
        pool = HttpPool(base or self.url)
        try:
            status, _, body = await pool.fetch("GET", path, timeout_s=5.0)
        finally:
            pool.close()
        return status, body

    async def complete(
        self,
        prompt: list[int],
        *,
        max_tokens: int,
        **options: Any,  # noqa: ANN401
    ) -> tuple[list[int], Any]:
        """Stream one completion; return its token ids and its usage."""
        token_ids: list[int] = []
        usage = None
        finishes = 0
        stream = await self.client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True, "ignore_eos": True} | options,
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                token_ids += (choice.model_extra or {}).get("token_ids") or []
                finishes += choice.finish_reason is not None
        assert finishes == 1, f"{finishes} finish reasons in one stream"
        return token_ids, usage

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        for service in self.services:
            await service.stop()
        for double in self.doubles:
            await double.kill()
