"""Configuration: what an operator can set, as one tree of frozen structs.

`Config` is the whole tree; `dsched.config_load` reads it (file < environment < flag), and every key
is also a flag (`front_door.port` is `--front-door-port`) and a variable (`DSCHED_FRONT_DOOR_PORT`).
Units are in the names. `null` means the default, so a field whose type allows `None` defaults to
`None`; `0`, `""` and `[]` are values like any other.

The text under a field is its documentation everywhere: `dsched run --help` prints its first
sentence, and `docs/operations.md` is checked against the fields. For a limit it says what goes
wrong above and below. This is the only module that reads the environment. It imports nothing but
`msgspec` and the base layer, so that an agent inside an engine can afford it.
"""

import os
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dsched.errors import ConfigError

ENVIRONMENT_PREFIX = "DSCHED_"

BUILTIN_ROUTING_POLICIES = ("two_term", "least_requests", "least_kv")
"""Routing policies that need no `module:Class`."""

CONFIG_FILE_VARIABLE = "DSCHED_CONFIG"
"""Names the configuration file where no `-c` does."""

OTHER_VARIABLES = (
    CONFIG_FILE_VARIABLE,
    "DSCHED_ENDPOINT",
    "DSCHED_ENGINE_ID",
    "DSCHED_AGENT_QUEUE",
    "DSCHED_STEP_BUDGET_MS",
    "DSCHED_COSTS",
    "DSCHED_CHUNK_ALIGNMENT",
    "DSCHED_CHUNK_WEIGHTS",
    "DSCHED_CHUNK_WEIGHTS_ARGS",
    "DSCHED_SHARED",
)
"""Variables that are no config keys: the file, what an agent inside an engine reads, and where
tests and benchmarks look for data."""

Port = Annotated[int, Meta(ge=0, le=65_535)]
"""TCP port; 0 lets the system choose a free one, which the log then names."""

PositiveInt = Annotated[int, Meta(ge=1, le=1 << 53)]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, Meta(gt=0, le=604_800)]
"""A duration between a moment and a week."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every part of the configuration."""


class FrontDoorConfig(Section, frozen=True, kw_only=True):
    """The OpenAI-compatible HTTP server that clients talk to."""

    host: str = "127.0.0.1"
    """Address to listen on. `0.0.0.0` opens it to the network, without authentication."""
    port: Port = 8000
    """Port to listen on; 0 chooses a free one."""
    max_body_bytes: PositiveInt = 8 * 1024 * 1024
    """Largest request body. Below: long prompts get 413. Above: a few clients can fill the
    memory, and parsing one body delays every stream."""
    max_header_bytes: Annotated[int, Meta(ge=1_024, le=1 << 20)] = 32 * 1024
    """Largest request line and headers together. Below: large cookies or tokens get 431. Above: a
    client that never ends its headers holds that much memory."""
    header_timeout_s: Seconds = 10.0
    """Time for a client to send its headers. Below: slow links are cut off. Above: idle
    half-requests hold connections."""
    body_timeout_s: Seconds = 60.0
    """Time for a client to send its body. Below: long prompts over slow links are cut off. Above:
    a slow writer holds a connection and its buffer."""
    keep_alive_timeout_s: Seconds = 75.0
    """Time a connection may wait for its next request. Below: clients reconnect often, and one
    behind a proxy with a longer timeout sees resets. Above: idle connections hold descriptors."""
    max_connections: PositiveInt = 16_384
    """Connections open at once. Below: clients are refused while there is room. Above: the process
    may run out of file descriptors, and then cannot reach its engines either."""
    max_open_requests: PositiveInt = 8_192
    """Requests in work at once, streams included. Below: clients get 429 while engines have room.
    Above: more prompts and streams in memory than the process can serve in time."""
    write_buffer_bytes: Annotated[int, Meta(ge=4_096, le=1 << 30)] = 256 * 1024
    """Unsent bytes of one stream before its client counts as slow. Below: short stalls of the
    network count. Above: many slow clients fill the memory."""
    slow_reader_timeout_s: Seconds = 30.0
    """Time a slow client may stay slow before its request is aborted. Below: phones on trains lose
    their answers. Above: engines compute for clients that do not read."""
    stop_grace_s: Annotated[float, Meta(ge=0, le=604_800)] = 30.0
    """Time that open streams get to end after SIGTERM. Below: answers are cut. Above: a restart
    takes as long as the longest answer."""
    token_cache_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 128 * 1024 * 1024
    """Memory, for each model, of prompts that were tokenised before; 0 tokenises every prompt
    whole. A token takes about 12 bytes with its text; a text that takes more than a fourth is not
    kept. Below: chats are tokenised again at every turn. Above: memory is kept for chats that have
    ended."""
    server_header: str = "dsched"
    """Value of the `Server` response header; empty leaves the header out."""


class AdminConfig(Section, frozen=True, kw_only=True):
    """The admin API, which has no authentication: keep it on a private address."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8001
    """Port to listen on; 0 chooses a free one."""


ChatFormat = Literal["template", "deepseek-v4", "deepseek-v4.1"]
ToolCallFormat = Literal["hermes"]
ReasoningFormat = Literal["think"]


class ModelConfig(Section, frozen=True, kw_only=True):
    """The model that every engine of a pool serves."""

    name: str
    """Name that clients send as `model`."""
    tokenizer: str | None = None
    """Folder or `tokenizer.json` file; default: what the engine says of its model."""
    chat_template: str | None = None
    """Jinja file that renders chat messages; default: the template beside the tokenizer."""
    chat_format: ChatFormat = "template"
    """How chats become prompts and answers become messages: by the chat template, or as DeepSeek
    V4 and V4.1 do, with tools and reasoning; those need the extra `deepseek`."""
    tool_call_format: ToolCallFormat | None = None
    """Shape in which a model with a chat template writes tool calls; `hermes` is that of Hermes,
    Qwen2.5 and Qwen3. Without it `tools` are refused, unless `tool_choice` demands calls."""
    reasoning_format: ReasoningFormat | None = None
    """Shape in which a model with a chat template writes reasoning before its answer: `think` is
    `<think>...</think>`, which becomes `reasoning_content`. Default: it is part of the answer."""
    max_model_len: PositiveInt | None = None
    """Tokens of prompt and answer together; default: what the engine says. Below the engine's
    own value long requests are refused; above it the engine refuses them."""


class EngineConfig(Section, frozen=True, kw_only=True):
    """One engine of a pool. Hints hold until the engine reports its own values."""

    id: str | None = None
    """Unique name in the cluster; default: pool name and position, `decode-0`. An agent in the
    engine must use the same name."""
    kind: Literal["sim", "vllm", "sglang"] = "vllm"
    """What it runs. `sim` is simulated inside dsched and takes no `url`."""
    url: str | None = None
    """Where a running engine answers, as `http://host:port`; a trailing `/` or `/v1` is dropped."""
    model: str | None = None
    """Name that this engine itself calls the model by; default: the pool's name for it."""
    num_dp_ranks: Annotated[int, Meta(ge=1, le=4_096)] | None = None
    """DP ranks of the engine; default: what it says, else 1. Below: ranks get nothing. Above:
    requests are steered to ranks that do not exist and refused."""
    kv_capacity_tokens: PositiveInt | None = None
    """KV tokens one DP rank holds; default: what it says. Below: capacity stays unused. Above:
    the engine preempts."""
    max_running_requests: PositiveInt | None = None
    """Requests one DP rank runs at once; default: what it says. Below: the rank idles. Above:
    requests wait inside the engine, where they cannot be moved."""
    ep_group: str | None = None
    """Engines of a pool with the same name here form one EP group and fail together; default: the
    engine is a group by itself."""
    kv_events: str | None = None
    """Where this engine of a prefill pool publishes its KV cache events, as `tcp://host:port`; DP
    rank r at the port plus r. Prompts then go where their beginning is cached. Leave it out where
    all engines share a KV store."""
    kv_events_replay: str | None = None
    """Where it sends again what was missed, as `tcp://host:port`. Default: after a gap its cache is
    learned anew."""
    elastic_ep: bool = False
    """Its EP group goes on without ranks that it lost. For engines that are started so; with others
    requests are sent to a group that hangs."""


class PoolConfig(Section, frozen=True, kw_only=True):
    """Engines that do the same work for one model."""

    role: Literal["combined", "prefill", "decode"] = "combined"
    """Which part of a request they compute. A model has one `combined` pool, or one `prefill` and
    one `decode` pool whose engines hand KV to each other."""
    model: ModelConfig
    """What the pool serves."""
    engines: tuple[EngineConfig, ...]
    """At least one."""


class LaunchConfig(Section, frozen=True, kw_only=True):
    """Engines that dsched starts itself, on this machine, when no pool is configured."""

    engine: Literal["sim", "vllm", "sglang"] = "sim"
    """What to start: simulated engines inside dsched, or real ones as child processes."""
    model: str | None = None
    """Model folder for `vllm` and `sglang`; `tiny` makes a small random model to try with."""
    replicas: Annotated[int, Meta(ge=1, le=1_024)] = 2
    """Engines to start. More than the machine has devices or memory for: they fail to start."""
    args: tuple[str, ...] = ()
    """Further command-line arguments for each engine, as a YAML list."""
    chat_format: ChatFormat = "template"
    """How the model's chats become prompts and answers become messages; see `POOL.model`."""
    tool_call_format: ToolCallFormat | None = None
    """Shape in which the model writes tool calls; see `POOL.model`."""
    reasoning_format: ReasoningFormat | None = None
    """Shape in which the model writes reasoning; see `POOL.model`."""
    python: str | None = None
    """Interpreter of the environment that has the engine; default: the one dsched runs in."""
    data_parallel_size: Annotated[int, Meta(ge=1, le=4_096)] = 1
    """DP ranks of each engine. More than the machine has room for: they fail to start."""
    expert_parallel: bool = False
    """Let the DP ranks of an engine share one set of experts: an EP group, which fails as a
    whole."""
    load_balancer: Literal["internal", "external"] = "internal"
    """One server in front of an engine's DP ranks, or one for each of them. dsched chooses the rank
    in both."""


class SimConfig(Section, frozen=True, kw_only=True):
    """Simulated engines: size and the affine cost of their steps."""

    model: str = "dsched-sim"
    """Name that clients send as `model`."""
    num_dp_ranks: Annotated[int, Meta(ge=1, le=4_096)] = 2
    """DP ranks of each engine; they step together, as long as the slowest."""
    kv_capacity_tokens: PositiveInt = 262_144
    """KV tokens one DP rank holds. Below the longest request: it is refused."""
    max_running_requests: PositiveInt = 256
    """Requests one DP rank runs at once. Below: ranks idle. Above: steps get long."""
    max_model_len: Annotated[int, Meta(ge=2, le=1 << 30)] = 131_072
    """Tokens of prompt and answer together."""
    chunk_tokens: PositiveInt = 2_048
    """Prompt tokens one DP rank computes in a step. Below: long prompts wait many steps. Above:
    running requests wait for long steps."""
    step_base_us: Annotated[float, Meta(gt=0, le=60_000_000)] = 15_000.0
    """Time of a step that computes nothing, in microseconds."""
    request_cost_us: Annotated[float, Meta(ge=0, le=60_000_000)] = 200.0
    """Time each running request adds to a step, in microseconds."""
    kv_token_cost_ns: Annotated[float, Meta(ge=0, le=1_000_000_000)] = 26.0
    """Time each KV token adds to a step, in nanoseconds."""
    prefill_token_cost_us: Annotated[float, Meta(ge=0, le=60_000_000)] = 30.0
    """Time each computed prompt token adds to a step, in microseconds."""
    moe_layers: Annotated[int, Meta(ge=0, le=128)] = 16
    """Layers whose invented expert load is shown in the live picture; 0 shows none."""
    num_experts: Annotated[int, Meta(ge=2, le=1_024)] = 64
    """Experts of such a layer; with `placement.interval_s` they are placed by their load."""
    redundant_experts: Annotated[int, Meta(ge=0, le=1_024)] = 0
    """Slots beyond one for each expert; more where the DP ranks do not divide them."""


PolicyArguments = dict[str, bool | int | float | str | list[Any] | dict[str, Any]]
"""Keyword arguments of a policy of an operator's own."""


class RoutingConfig(Section, frozen=True, kw_only=True):
    """Which DP rank a request goes to, and what waits when no rank has room."""

    policy: str = "two_term"
    """`two_term`, `least_requests`, `least_kv`, or a policy of your own as `module:Class`."""
    policy_args: PolicyArguments = {}
    """Keyword arguments for a policy of your own, as a YAML mapping."""
    policy_budget_ms: Annotated[float, Meta(gt=0, le=10_000)] = 2.0
    """Time of one call of a policy of your own, of any kind, in milliseconds. Below: good policies
    are late on a busy machine. Above: a bad one delays every request by that much until it is
    suspended."""
    request_cost_us: Annotated[float, Meta(ge=0, le=60_000_000)] = 200.0
    """Step time that one more running request costs, in microseconds: the first term. Too low
    against the second: ranks fill with many short requests."""
    kv_token_cost_ns: Annotated[float, Meta(ge=0, le=1_000_000_000)] = 26.0
    """Step time that one more KV token costs, in nanoseconds: the second term. Too low against
    the first: a long context shares its rank with too many others."""
    prefill_costs: str | None = None
    """What prompts cost on prefill pools: a file that `dsched calibrate` wrote, or a preset as
    `model/gpu/epN`. Default: a preset; only proportions between prompts matter."""
    max_local_prefill_tokens: Count = 0
    """Prompts of up to so many tokens are computed by their decode rank, where there is a prefill
    pool. Below: short prompts pay for two engines. Above: decode steps get long."""
    max_transfer_age_s: Seconds = 60.0
    """Time that KV may wait on a prefill engine for its decode rank, and the rank for it; keep it
    below the engines' own limit. Above: KV is asked for that is gone, and lost KV is noticed late.
    Below: prompts are computed again."""
    migration: Literal["off", "kv", "recompute"] = "off"
    """Whether running requests move to ranks with less to do: `kv` where the engines hand KV over
    (today only simulated ones do), `recompute` by computing prompt and answer so far again."""
    migration_interval_s: Seconds = 1.0
    """Time between two looks at who should move. Below: moves are planned before the last ones
    show. Above: ranks stay apart for longer."""
    max_migrations: Annotated[int, Meta(ge=1, le=1_024)] = 4
    """Requests that one look moves in a pool. Below: ranks stay apart for longer. Above: many
    clients see a pause."""
    max_queued_requests: Count = 4_096
    """Requests that wait at the router for a rank; 0 refuses at once. Below: bursts get 429.
    Above: clients wait for answers that come too late to be of use."""
    max_hold_s: Seconds = 10.0
    """Time a request may wait for a rank with room before it goes to the least loaded one. Below:
    requests wait inside engines, where they cannot be moved. Above: they wait while a wrong count
    of the room is mended."""
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """Ranks a request is tried on when engines fail. Below: a second failure ends it. Above: a
    request that kills engines kills more of them."""
    router_index: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    """Number of this dsched among several over the same engines, from 0, which turns their ties
    apart; default: drawn at the start."""
    talks_to_peers: bool = True
    """Tell other dsched processes over the same engines what is booked here, and believe them.
    `false`: they know of each other by the engines' reports alone."""
    peer_endpoint: str | None = None
    """ZeroMQ endpoint where they hear it, as `tcp://HOST:PORT` with an address of this host that
    they reach; `*` chooses a port. Default: `tcp://127.0.0.1:*`, for those of one host."""
    queue_timeout_s: Seconds = 120.0
    """Time a request may wait for a rank before it ends with 503. Below: short overloads become
    errors. Above: clients give up first, and their work is done for nobody."""


class PolicyConfig(Section, frozen=True, kw_only=True):
    """A policy of your own; without one the default decides."""

    policy: str | None = None
    """`module:Class`, or the name of an entry point in `dsched.policies`."""
    args: PolicyArguments = {}
    """Keyword arguments for that policy, as a YAML mapping."""


class PoliciesConfig(Section, frozen=True, kw_only=True):
    """Policies of your own beside that of `routing`."""

    admission: PolicyConfig = PolicyConfig()
    """Who is accepted. Default: everybody."""
    priority: PolicyConfig = PolicyConfig()
    """Who of those that wait for a rank goes first. Default: tenants in turn."""
    handoff: PolicyConfig = PolicyConfig()
    """Where a request goes on that lost its engine. Default: as a new one."""
    chunk_weights: PolicyConfig = PolicyConfig()
    """How prompts of four lengths share prefill time, inside engines that dsched starts; others
    need `DSCHED_CHUNK_WEIGHTS`. Default: 4, 3, 2, 1."""
    rebalance: PolicyConfig = PolicyConfig()
    """When experts are placed anew, of the times that `placement.interval_s` allows. Default: at
    each of them."""


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """What dsched decides inside engines, every step."""

    step_budget_ms: Annotated[float, Meta(gt=0, le=600_000)] | None = None
    """Time that one step should take, in milliseconds; chunks of prompts are cut to it. Engines
    that dsched launches start with it; others need `DSCHED_STEP_BUDGET_MS` at their start and get
    this value when they greet. Default: the engine's own rule. Below: prompts wait many steps.
    Above: running answers stutter while a prompt is computed."""


class PlacementConfig(Section, frozen=True, kw_only=True):
    """Expert placements commanded by the elected dsched, for engines that take them: simulated
    ones. vLLM and SGLang plan inside, with dsched's planner."""

    interval_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    """Time between two rebalances by load; a lost rank is planned for at once. 0: off. Below:
    experts move for differences that the next window undoes. Above: steps wait for hot experts."""
    max_moves: Count | None = None
    """Expert copies that may move in one layer at a time; default: as many as it takes. Below:
    ranks stay uneven for longer. Above: more weights move at once, and steps wait for them."""


class FaultsConfig(Section, frozen=True, kw_only=True):
    """When an engine counts as lost, and how long its requests may wait for another."""

    decode_timeout_s: Seconds = 3.0
    """Time without a token or a reported step after which an engine that was answering counts as
    frozen. Below: a long step looks like a freeze. Above: its clients wait longer."""
    prefill_timeout_s: Seconds = 10.0
    """The same for a new engine that has only prompts to compute, without their own time. Below: a
    slow first step looks like a freeze. Above: its clients wait longer."""
    prefill_token_cost_us: Annotated[float, Meta(ge=0, le=60_000_000)] = 1_000.0
    """What each prompt token adds to that time, in microseconds; many times its real cost. Below:
    long prompts look like a freeze. Above: a freeze during a long prompt is noticed late."""
    prefill_factor: Annotated[float, Meta(ge=1, le=1_000)] = 4.0
    """Once an engine's pace is known, the time for prompts is `decode_timeout_s` and so many times
    what its prefill cost model expects. Below: a prompt with little cached prefix looks like a
    freeze. Above: a freeze amid long prompts is noticed late."""
    stream_timeout_s: Seconds = 60.0
    """Time without a token after which one request is moved while its engine goes on. Below:
    preempted requests are moved for nothing. Above: a request lost inside an engine waits."""
    handoff_deadline_s: Seconds = 60.0
    """Time a request that lost its engine may wait for another before it ends with an error.
    Below: a restart of the engines cuts answers. Above: clients hang when nothing comes back."""
    reprefill_tokens_per_rank: Count = 8_192
    """Prompt tokens of requests that lost their engine which are computed again at the same time,
    for each DP rank that is up; 0 is no limit. Below: their clients wait longer. Above: new
    requests wait for their first token after a loss."""
    engine_recovery: Literal["off", "watch", "repair"] = "watch"
    """What to do with the engines' own fault API, where they have one: nothing; stop using ranks
    that they say are lost; or also let them repair their EP group (the elected leader asks)."""
    spare: Literal["none", "n-1"] = "n-1"
    """Load that a pool takes: `n-1` runs what its EP groups hold without the largest one, so that a
    lost group's requests find room; `none` uses all of them. What is above waits at the router."""


class AgentConfig(Section, frozen=True, kw_only=True):
    """The socket that agents inside engines publish their load to."""

    endpoint: str = "tcp://127.0.0.1:8002"
    """ZeroMQ endpoint that dsched binds; engines get it as `DSCHED_ENDPOINT`."""
    max_pending_messages: PositiveInt = 65_536
    """Messages held for dsched before new ones are dropped and counted. Below: bursts of reports
    are lost. Above: dsched catches up on loads long past."""


class JournalConfig(Section, frozen=True, kw_only=True):
    """The token journal: what each request has emitted, for handoff and restart."""

    kind: Literal["sqlite", "memory"] = "sqlite"
    """`memory` serves handoff only; `sqlite` also keeps it for a restarted dsched."""
    path: str | None = None
    """SQLite file; default: `journal.sqlite3` in `state_dir`."""
    flush_interval_ms: Annotated[float, Meta(gt=0, le=60_000)] = 20.0
    """Longest time a token stays out of the file, in milliseconds. Below: more commits than the
    disk likes. Above: more tokens are lost to a restart when dsched is killed."""
    max_batch_requests: PositiveInt = 4_096
    """Requests of one commit. Below: many commits. Above: one commit holds the file for long."""
    max_pending_requests: PositiveInt = 65_536
    """Requests that may wait for a stalled disk before finished ones are kept out of the file and
    counted. Below: short stalls lose history. Above: a long stall fills the memory."""
    max_retained_requests: Count = 10_000
    """Finished requests kept in the file for clients that ask again. Above: the file grows."""
    retention_s: Seconds = 3_600.0
    """Age at which a finished request leaves the file."""
    sync_full: bool = False
    """Wait for the disk at each commit. `false` survives a killed process, not a power cut."""


class RegistryConfig(Section, frozen=True, kw_only=True):
    """Who is in the cluster."""

    url: str | None = None
    """`sqlite:///PATH`, `memory://`, or for several hosts `etcd://HOST:PORT,HOST:PORT/PREFIX`;
    default: `registry.sqlite3` in `state_dir`."""
    lease_s: Annotated[float, Meta(ge=0.5, le=3_600)] = 10.0
    """Lifetime of an entry that is not renewed; etcd makes it whole seconds and at least 2. Below:
    a short stall looks like a death. Above: the dead stay listed."""
    required: bool = True
    """End with status 2 when no etcd endpoint answers at the start. `false` starts without, and
    registers once one does. An outage later ends nothing in either case."""
    user: str | None = None
    """Name in an etcd that asks for one; needs `password_file`."""
    password_file: str | None = None
    """File that holds that user's password and nothing else."""
    ca_file: str | None = None
    """PEM file of the authorities that etcd's certificates come from; every call is TLS then.
    Default: plain HTTP."""


class TraceConfig(Section, frozen=True, kw_only=True):
    """The decision trace that `dsched explain` and `dsched replay` read; counts only, no text."""

    enabled: bool = True
    """Keep the last decisions in memory, for `dsched explain`."""
    ring_records: Annotated[int, Meta(ge=256, le=1 << 24)] = 65_536
    """Records kept, about five for each request. Below: requests are forgotten soon. Above:
    memory, 100 to 500 bytes a record, more with more DP ranks."""
    file: str | None = None
    """Record every decision into this file from the start, for `dsched replay`; a file that is
    there is kept as `FILE.old`. Default: only on `dsched trace start`."""
    max_file_mb: PositiveInt = 4_096
    """Size at which recording to a file ends, in megabytes. Below: records of little time. Above:
    the disk fills."""


class OtelConfig(Section, frozen=True, kw_only=True):
    """OpenTelemetry spans of requests; `traceparent` is passed on in any case."""

    endpoint: str | None = None
    """Where spans go, OTLP over HTTP, as `http://HOST:4318/v1/traces`; needs the extra `otel`.
    Default: no spans are made."""
    service_name: str = "dsched"
    """Name of this service in traces."""
    sample_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Part of the requests without a `traceparent` that get spans; the others follow the client's
    sampling. Below: rare faults have no trace. Above: more to send and to keep."""


class MetricsConfig(Section, frozen=True, kw_only=True):
    """What `/metrics` shows."""

    process: bool = True
    """Show memory, CPU time and file descriptors of the dsched process."""


class LoggingConfig(Section, frozen=True, kw_only=True):
    """The log on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important level that is written."""
    format: Literal["auto", "json", "console"] = "auto"
    """`auto` is `console` on a terminal and `json` elsewhere."""


class DebugConfig(Section, frozen=True, kw_only=True):
    """For finding faults in dsched."""

    validate: bool = False
    """Check every invariant after each tick. Slow."""


class Config(Section, frozen=True, kw_only=True):
    """Everything an operator can set."""

    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Seed of every random choice; it is logged, so that choices can be replayed."""
    state_dir: str = ".dsched"
    """Folder for journal and registry; made when missing."""
    front_door: FrontDoorConfig = FrontDoorConfig()
    admin: AdminConfig = AdminConfig()
    pools: dict[str, PoolConfig] = {}
    """Engines by pool name, as a YAML mapping; empty starts those of `launch` instead."""
    launch: LaunchConfig = LaunchConfig()
    sim: SimConfig = SimConfig()
    routing: RoutingConfig = RoutingConfig()
    policies: PoliciesConfig = PoliciesConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    placement: PlacementConfig = PlacementConfig()
    faults: FaultsConfig = FaultsConfig()
    agent: AgentConfig = AgentConfig()
    journal: JournalConfig = JournalConfig()
    registry: RegistryConfig = RegistryConfig()
    trace: TraceConfig = TraceConfig()
    otel: OtelConfig = OtelConfig()
    metrics: MetricsConfig = MetricsConfig()
    logging: LoggingConfig = LoggingConfig()
    debug: DebugConfig = DebugConfig()

    def journal_path(self) -> str:
        """Return the file of the token journal."""
        return self.journal.path or os.path.join(self.state_dir, "journal.sqlite3")

    def registry_url(self) -> str:
        """Return the URL of the registry."""
        if self.registry.url is not None:
            return self.registry.url
        return f"sqlite:///{os.path.join(self.state_dir, 'registry.sqlite3')}"

    def engine_id(self, pool_name: str, index: int) -> str:
        """Return the id of engine number `index` of a pool.

        >>> Config().engine_id("sim", 1)
        'sim-1'
        """
        pool = self.pools.get(pool_name)
        stated = pool.engines[index].id if pool is not None else None
        return stated if stated is not None else f"{pool_name}-{index}"


class AgentSettings(Section, frozen=True, kw_only=True):
    """What an agent inside an engine process needs to know."""

    endpoint: str | None
    """Where to publish; `None` turns the agent off."""
    engine_id: str | None
    """The engine's name in the cluster; `None` lets the agent derive one."""
    max_pending_messages: PositiveInt = 1_024
    """Messages held while dsched is away; further ones are dropped. Never blocks a step."""


def agent_settings_from_environment() -> AgentSettings:
    """Read `DSCHED_ENDPOINT`, `DSCHED_ENGINE_ID` and `DSCHED_AGENT_QUEUE`; empty means not set.

    Raises `ConfigError`, naming the variable, for a value that cannot be used.
    """
    endpoint = os.environ.get("DSCHED_ENDPOINT") or None
    if endpoint is not None and "://" not in endpoint:
        raise ConfigError(f"DSCHED_ENDPOINT: {endpoint!r} is not of the form tcp://host:port")
    queue_text = os.environ.get("DSCHED_AGENT_QUEUE") or "1024"
    if not queue_text.isdecimal() or int(queue_text) < 1:
        raise ConfigError(f"DSCHED_AGENT_QUEUE: {queue_text!r} is not a count of messages >= 1")
    return AgentSettings(
        endpoint=endpoint,
        engine_id=os.environ.get("DSCHED_ENGINE_ID") or None,
        max_pending_messages=int(queue_text),
    )


class ChunkSettings(Section, frozen=True, kw_only=True):
    """How a scheduler inside an engine process plans chunks."""

    step_budget_ms: Annotated[float, Meta(gt=0, le=600_000)] | None
    """Time a step may take, in milliseconds; `None` leaves chunks to the engine."""
    costs: str | None
    """Cost models: a preset's name or a file of `dsched calibrate`; `None` learns from nothing."""
    chunk_alignment: PositiveInt = 64
    """Chunks are multiples of this many tokens, except a prompt's last. Below: kernels run partly
    empty tiles. Above: the budget is used coarsely."""
    weights_policy: str | None = None
    """`module:Class` or entry point of a policy for the weights of the length buckets."""
    weights_args: dict[str, Any] = {}
    """Keyword arguments for it."""


def chunk_settings_from_environment() -> ChunkSettings:
    """Read `DSCHED_STEP_BUDGET_MS`, `DSCHED_COSTS`, `DSCHED_CHUNK_ALIGNMENT`,
    `DSCHED_CHUNK_WEIGHTS` and `DSCHED_CHUNK_WEIGHTS_ARGS` (JSON); empty means not set.

    Raises `ConfigError`, naming the variable, for a value that cannot be used.
    """
    budget_text = os.environ.get("DSCHED_STEP_BUDGET_MS") or None
    alignment_text = os.environ.get("DSCHED_CHUNK_ALIGNMENT") or "64"
    try:
        budget_ms = None if budget_text is None else float(budget_text)
    except ValueError:
        budget_ms = 0.0
    if budget_ms is not None and not 0 < budget_ms <= 600_000:
        raise ConfigError(
            f"DSCHED_STEP_BUDGET_MS: {budget_text!r} is not a time of 0 to 600000 milliseconds"
        )
    if not alignment_text.isdecimal() or int(alignment_text) < 1:
        raise ConfigError(f"DSCHED_CHUNK_ALIGNMENT: {alignment_text!r} is not a count >= 1")
    return ChunkSettings(
        step_budget_ms=budget_ms,
        costs=os.environ.get("DSCHED_COSTS") or None,
        chunk_alignment=int(alignment_text),
        weights_policy=os.environ.get("DSCHED_CHUNK_WEIGHTS") or None,
        weights_args=_json_mapping("DSCHED_CHUNK_WEIGHTS_ARGS"),
    )


def _json_mapping(variable: str) -> dict[str, Any]:
    text = os.environ.get(variable) or "{}"
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{variable}: {text!r} is not a JSON object") from error


def chunk_weights_environment(config: "PolicyConfig") -> dict[str, str]:
    """Return the variables that name a chunk weights policy to an engine that dsched starts.

    The engine gets this process's working folder as one more place to import from, as dsched has.
    """
    if config.policy is None:
        return {}
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), os.getcwd())))
    return {
        "DSCHED_CHUNK_WEIGHTS": config.policy,
        "DSCHED_CHUNK_WEIGHTS_ARGS": msgspec.json.encode(config.args).decode(),
        "PYTHONPATH": path,
    }


class VerifySettings(Section, frozen=True, kw_only=True):
    """How a scheduler inside an engine process plans verify lengths."""

    is_on: bool
    """Plan them; else the engine verifies what its drafter drafts."""
    step_cost: str | None
    """File of a step cost curve (dsched's, SGLang's or TensorRT-LLM's form); `None` learns one from
    the first steps."""


def verify_settings_from_environment() -> VerifySettings:
    """Read `DSCHED_VERIFY_LENGTHS` (`on`, `off` or empty) and `DSCHED_STEP_COST`.

    Raises `ConfigError`, naming the variable, for a value that cannot be used.
    """
    text = os.environ.get("DSCHED_VERIFY_LENGTHS") or "off"
    if text not in ("on", "off"):
        raise ConfigError(f"DSCHED_VERIFY_LENGTHS: {text!r} is neither 'on' nor 'off'")
    return VerifySettings(is_on=text == "on", step_cost=os.environ.get("DSCHED_STEP_COST") or None)


class EplbSettings(Section, frozen=True, kw_only=True):
    """How expert placements are planned inside an engine process."""

    is_on: bool
    """Plan them; else the engine's own planner does."""
    trigger: Annotated[float, Meta(ge=0, le=100)] = 0.03
    """Heaviest over mean rank load, less one, above which a layer is changed."""
    stop: Annotated[float, Meta(ge=0, le=100)] = 0.02
    """The same, at which a changed layer is good enough; at most `trigger`."""
    max_moves: Count | None = None
    """Expert copies that may move in one layer at a time; `None`: as many as it takes. Below:
    ranks stay uneven for longer. Above: more weights move at once, and steps wait for them."""
    keep_groups: bool = False
    """Keep each expert group of the model on one node (prefill with group-limited routing)."""


def eplb_settings_from_environment() -> EplbSettings:
    """Read `DSCHED_EPLB` (1 is on), `_TRIGGER`, `_STOP`, `_MAX_MOVES` and `_GROUPS` (1 keeps them).

    Raises `ConfigError`, naming the variable, for a value that cannot be used.
    """
    values: dict[str, object] = {"is_on": _flag("DSCHED_EPLB")}
    values["keep_groups"] = _flag("DSCHED_EPLB_GROUPS")
    for name, kind in (("trigger", float), ("stop", float), ("max_moves", int)):
        variable = f"DSCHED_EPLB_{name.upper()}"
        text = os.environ.get(variable)
        if not text:
            continue
        try:
            values[name] = kind(text)
        except ValueError as error:
            raise ConfigError(f"{variable}: {text!r} is not a number") from error
    try:
        settings = msgspec.convert(values, EplbSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"DSCHED_EPLB: {error}") from error
    if settings.stop > settings.trigger:
        raise ConfigError(
            f"DSCHED_EPLB_STOP: {settings.stop} is above DSCHED_EPLB_TRIGGER {settings.trigger}"
        )
    return settings


def _flag(variable: str) -> bool:
    text = os.environ.get(variable) or "0"
    if text not in ("0", "1"):
        raise ConfigError(f"{variable}: {text!r} is neither 0 nor 1")
    return text == "1"


def agent_environment(*, endpoint: str, engine_id: str) -> dict[str, str]:
    """Return the variables that make an agent in a child process publish to `endpoint`."""
    return {"DSCHED_ENDPOINT": endpoint, "DSCHED_ENGINE_ID": engine_id}


def inherited_environment() -> dict[str, str]:
    """Return a copy of this process's environment, for child processes that dsched starts."""
    return dict(os.environ)


def dsched_environment() -> dict[str, str]:
    """Return the variables that start with `DSCHED_`, sorted by name."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(ENVIRONMENT_PREFIX)
    }
