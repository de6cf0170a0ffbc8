"""Each mistake in a configuration is one line that starts with the path of the value."""

import re
from pathlib import Path

import pytest

from dsched.config_load import MAX_FILE_BYTES, load_config, parse_config
from dsched.errors import ConfigError

LAUNCH = "launch: {{engine: vllm, model: m, args: [--dtype, float32, {}, '80']}}"
POOL = "pools: {{decode: {{model: {{name: m}}, engines: [{}]}}}}"

PAIR = """
pools:
  p: {{role: {}, model: {{name: m}}, engines: [{}]}}
  d: {{role: {}, model: {{name: m}}, engines: [{}]}}
"""
VLLM, SIM = "{url: 'http://a'}", "{kind: sim}"

PREFILL_WITHOUT_ITS_DECODE = """
pools:
  p: {role: prefill, model: {name: m}, engines: [{url: 'http://a'}]}
  d: {role: decode, model: {name: other}, engines: [{url: 'http://b'}]}
"""


def error_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    message = str(caught.value)
    assert "\n" not in message, "an operator greps lines"
    return message


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (
            POOL.format("{url: 'http://a'}, {url: 3}"),
            "$.pools.decode.engines[1].url: expected `str | null`, got `int`",
        ),
        ("front_dor: {}", "$.front_dor: unknown key; did you mean `front_door`"),
        ("front_door: {prot: 1}", "$.front_door.prot: unknown key; did you mean `port`"),
        (
            POOL.format("{url: 'http://a', num_ranks: 1}"),
            "$.pools.decode.engines[0].num_ranks: unknown key; did you mean `num_dp_ranks`",
        ),
        ("front_door: {port: 65536}", "$.front_door.port: expected `int` <= 65535, got 65536"),
        ("front_door: {port: -1}", "$.front_door.port: expected `int` >= 0, got -1"),
        ("front_door: {port: '80'}", "$.front_door.port: expected `int`, got `str`"),
        ("front_door: {port: 8.5}", "$.front_door.port: expected `int`, got `float`"),
        ("front_door: {port: true}", "$.front_door.port: expected `int`, got `bool`"),
        ("front_door: {max_body_bytes: 0}", "$.front_door.max_body_bytes: expected `int` >= 1"),
        ("front_door: 3", "$.front_door: expected a mapping of keys, got `int`"),
        ("front_door: []", "$.front_door: expected a mapping of keys, got a list"),
        ("pools: [1]", "$.pools: expected a mapping of keys, got a list"),
        ("pools: {a: }", "$.pools.a: expected a mapping of keys, got nothing"),
        ("pools: {a: {engines: [{}]}}", "$.pools.a: missing key `model`"),
        (POOL.format("{}"), "$.pools.decode.engines[0].url: missing; an engine of kind 'vllm'"),
        ("pools: {a: {model: {name: m}}}", "$.pools.a: missing key `engines`"),
        ("launch: {args: x}", "$.launch.args: expected a list, got text"),
        ("launch: {args: [a, 1]}", "$.launch.args[1]: expected `str`, got `int`"),
        (LAUNCH.format("--port"), "$.launch.args[2]: '--port' is not for engines"),
        (LAUNCH.format("--port=80"), "$.launch.args[2]: '--port=80' is not for"),
        (LAUNCH.format("--data_parallel_size"), "$.launch.args[2]: '--data_parallel_size' is not"),
        (LAUNCH.format("--dp"), "$.launch.args[2]: '--dp' is not for engines"),
        ("logging: {level: warn}", "$.logging.level: 'warn' is none of debug, info"),
        ("routing: {queue_timeout_s: .inf}", "$.routing.queue_timeout_s: inf is not a finite"),
        ("routing: {queue_timeout_s: .nan}", "$.routing.queue_timeout_s: nan is not a finite"),
        ("- 1", "$: expected a mapping of keys, got a list"),
        ("just text", "$: expected a mapping of keys, got text"),
        ("1: 2", "$.1: unknown key"),
        ("a: [", "line 1: not YAML: "),
        ("a: 1\n  b: 2", "line 2: not YAML: "),
        ("a: 1\n---\nb: 2", "line 2: not YAML: "),
        ("\tseed: 1", "line 1: not YAML: "),
        ("seed: \x00", "line 1: not YAML: "),
        ("seed: 1\nadmin: {port: 1, port: 2}", "$.admin.port: key appears twice, first in line 2"),
        ("seed: 1\nseed: 2", "$.seed: key appears twice, first in line 1 (line 2)"),
        ("? [a]\n: 1", "$: a key must be text"),
        ("seed: 2026-13-45", "$.seed: month must be in 1..12"),
        ("seed: !!python/object:os.system {}", "$.seed: "),
        ("seed: 99999999999999999999999", "$.seed: "),
    ],
)  # fmt: skip
def test_mistake_is_one_line_with_its_path(text: str, start: str) -> None:
    """Wrong key, type, range or syntax: the path and the rule, or the line of broken YAML."""
    assert error_of(text).startswith(start)


def test_message_names_file_and_line(tmp_path: Path) -> None:
    """The operator is led to the line."""
    path = tmp_path / "c.yaml"
    path.write_text("seed: 1\nfront_door:\n  port: 70000\n")

    with pytest.raises(ConfigError, match=re.escape(f"({path}:3)")):
        load_config(path)


def test_message_names_the_variable_or_flag() -> None:
    """A wrong value from elsewhere says where it is from, too."""
    with pytest.raises(ConfigError, match=r"^\$\.admin\.port: 'x' is not .*\(\$DSCHED_ADMIN_PORT"):
        load_config(environment={"DSCHED_ADMIN_PORT": "x"})
    with pytest.raises(ConfigError, match=r"^\$\.admin\.port: .* 65535.*\(--admin-port\)"):
        load_config(flags={"admin.port": "70000"})
    with pytest.raises(ConfigError, match=r"^\$\.metrics\.process: 'maybe' is not true or false"):
        load_config(flags={"metrics.process": "maybe"})
    with pytest.raises(ConfigError, match=r"^\$\.pools: line 1: not YAML"):
        load_config(flags={"pools": "{"})
    with pytest.raises(ConfigError, match=r"^\$\.pools: expected a mapping"):
        load_config(flags={"pools": "3"})


def test_variable_under_a_broken_section_of_the_file(tmp_path: Path) -> None:
    """A variable cannot be put into a section that the file made a number."""
    path = tmp_path / "c.yaml"
    path.write_text("front_door: 3")

    with pytest.raises(ConfigError, match=r"^\$\.front_door: expected a mapping"):
        load_config(path, environment={"DSCHED_FRONT_DOOR_PORT": "1"})


def test_kubernetes_service_link_is_named_as_such() -> None:
    """A service called dsched-admin makes Kubernetes set DSCHED_ADMIN_PORT to a URL."""
    with pytest.raises(ConfigError, match="set by Kubernetes"):
        load_config(environment={"DSCHED_ADMIN_PORT": "tcp://10.0.0.1:8001"})


@pytest.mark.parametrize("text", ["a: &x [*x]", "a: &x {b: *x}"])
def test_alias_of_itself_is_refused(text: str) -> None:
    """A value that contains itself ends in an error, not in endless recursion."""
    assert "nested deeper" in error_of(text)


def test_alias_bomb_is_refused() -> None:
    """Nine levels of nine aliases would be 387 million values."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]

    assert "too large" in error_of("\n".join(lines))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"\xff\xfe", "not UTF-8"), (b"#" * (MAX_FILE_BYTES + 1), "larger than")],
)
def test_file_that_is_no_text(tmp_path: Path, content: bytes, reason: str) -> None:
    """A binary or a huge file is refused by name."""
    path = tmp_path / "c.yaml"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: {reason}"):
        load_config(path)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file and a folder are refused by name."""
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)


# -- what spans several values ---


def test_a_builtin_policy_takes_no_arguments() -> None:
    message = error_of("routing: {policy_args: {key: a}}")

    assert message.startswith("$.routing.policy_args: two_term takes no arguments")


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://a:8000", "http://a:8000"),
        ("http://a:8000/", "http://a:8000"),
        ("http://a:8000/v1", "http://a:8000"),
        ("http://a:8000/v1/", "http://a:8000"),
        ("HTTP://A:8000//", "http://a:8000"),
        ("http://a", "http://a:80"),
        ("https://a/prefix/v1", "https://a:443/prefix"),
        ("http://[0:0::1]:8000", "http://[::1]:8000"),
    ],
)
def test_url_is_normalised(url: str, normal: str) -> None:
    """One engine has one URL, however it is written."""
    config = parse_config(POOL.format(f"{{url: '{url}'}}"))

    assert config.pools["decode"].engines[0].url == normal


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("a:8000", "not of the form"),
        ("//a:8000", "not of the form"),
        ("ftp://a", "not of the form"),
        ("http://", "not of the form"),
        ("http://a b:8000", "contains a space"),
        ("http://a:8000 ", "contains a space"),
        ("http://a:99999", "Port out of range"),
        ("http://a:x", "Port could not be cast"),
        ("http://a:0", "port 0"),
        ("http://u:p@a:1", "may not have a user"),
        ("http://a:1/?x=1", "may not have a user"),
        ("", "not of the form"),
    ],
)
def test_url_that_cannot_be_used(url: str, reason: str) -> None:
    """A URL without scheme, with a space or with what we would not send is refused."""
    message = error_of(POOL.format(f"{{url: '{url}'}}"))

    assert message.startswith("$.pools.decode.engines[0].url: ")
    assert reason in message


@pytest.mark.parametrize("second", ["http://a:80", "http://a:80/", "http://A/v1"])
def test_one_url_twice_is_an_error(second: str) -> None:
    """Two entries for one engine would count its room twice, however they are written."""
    message = error_of(POOL.format(f"{{url: 'http://a:80'}}, {{url: '{second}'}}"))

    assert message.startswith("$.pools.decode.engines[1].url: ")
    assert "already at $.pools.decode.engines[0].url" in message


def test_one_engine_id_twice_is_an_error() -> None:
    """Also when one of them is the id that another pool's engine gets by its position."""
    stated = error_of(POOL.format("{id: x, url: 'http://a'}, {id: x, url: 'http://b'}"))
    derived = error_of(POOL.format("{url: 'http://a'}, {id: decode-0, url: 'http://b'}"))

    assert "$.pools.decode.engines[1].id: engine id 'x' is already at" in stated
    assert "engine id 'decode-0' is already at" in derived


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("pools: {d: {model: {name: m}, engines: []}}", "$.pools.d.engines: pool 'd' has no"),
        (
            "pools: {p: {role: prefill, model: {name: m}, engines: [{url: 'http://a'}]}}",
            "$.pools.p.role: a prefill pool needs a decode pool for model 'm'",
        ),
        (
            "pools: {d: {role: decode, model: {name: m}, engines: [{kind: sim}]}}",
            "$.pools.d.role: a decode pool needs a prefill pool for model 'm'",
        ),
        (
            PAIR.format("combined", SIM, "decode", SIM),
            "$.pools.d.role: pools 'p' and 'd' both serve 'm'; one pool is combined, or one is",
        ),
        (
            PAIR.format("prefill", SIM, "combined", SIM),
            "$.pools.d.role: pools 'p' and 'd' both serve 'm'",
        ),
        (
            PAIR.format("combined", SIM, "combined", SIM),
            "$.pools.d.role: pool 'p' is the combined pool of 'm' already",
        ),
        (
            PAIR.format("prefill", VLLM, "decode", SIM),
            "$.pools.p.engines: kinds sim, vllm cannot hand KV to each other",
        ),
        (
            PAIR.format("prefill", VLLM, "decode", "{url: 'http://b', kv_events: 'tcp://b:5557'}"),
            "$.pools.d.engines[0].kv_events: only real engines of a prefill pool have one",
        ),
        (
            PAIR.format("prefill", "{url: 'http://b', kv_events: 'http://b'}", "decode", VLLM),
            "$.pools.p.engines[0].kv_events: 'http://b' is not tcp://host:port or ipc://path",
        ),
        (
            PAIR.format("prefill", "{url: 'http://b', kv_events_replay: x}", "decode", VLLM),
            "$.pools.p.engines[0].kv_events_replay: goes together with kv_events",
        ),
        (
            PREFILL_WITHOUT_ITS_DECODE,
            "$.pools.p.role: a prefill pool needs a decode pool for model 'm'",
        ),
        (
            POOL.format(
                "{url: 'http://a', model: x}, {url: 'http://b', model: x}, {url: 'http://c'}"
            ),
            "$.pools.decode.engines: 2 of 3 engines name a model",
        ),
        ("pools: {d: {model: {name: ''}, engines: [{kind: sim}]}}", "$.pools.d.model.name: "),
        (POOL.format("{kind: sim, url: 'http://a'}"), "$.pools.decode.engines[0].url: a simulated"),
        (POOL.format("{id: 'a b', kind: sim}"), "$.pools.decode.engines[0].id: 'a b' is no name"),
        (POOL.format("{id: a/b, kind: sim}"), "$.pools.decode.engines[0].id: 'a/b' is no name"),
        ("pools: {'': {model: {name: m}, engines: [{kind: sim}]}}", "$.pools.: '' is no name"),
        ("pools: {a/b: {model: {name: m}, engines: [{kind: sim}]}}", "$.pools.a/b: 'a/b' is no"),
        ("launch: {engine: vllm}", "$.launch.model: engine 'vllm' needs a model folder"),
        ("admin: {port: 8000}", "$.admin.port: 8000 is also the front door's port"),
        ("front_door: {host: ''}", "$.front_door.host: "),
        ("front_door: {host: 'http://a'}", "$.front_door.host: "),
        ("agent: {endpoint: '127.0.0.1:1'}", "$.agent.endpoint: "),
        ("agent: {endpoint: 'tcp://127.0.0.1'}", "$.agent.endpoint: "),
        ("registry: {url: 'zookeeper://a'}", "$.registry.url: "),
        ("registry: {url: 'etcd://'}", "$.registry.url: "),
        ("registry: {url: 'etcd://a,'}", "$.registry.url: "),
        ("registry: {url: 'etcd://a:b'}", "$.registry.url: "),
        ("registry: {url: 'etcd://a:0'}", "$.registry.url: "),
        ("registry: {url: 'etcd://a:99999'}", "$.registry.url: "),
        ("registry: {url: 'etcd://a,b,a:2379'}", "$.registry.url: "),
        ("registry: {url: 'etcd://me:secret@a'}", "$.registry.url: no user in the URL"),
        ("registry: {url: 'etcd://a/b c'}", "$.registry.url: "),
        ("registry: {url: 'etcd://a?b'}", "$.registry.url: "),
        ("registry: {url: 'etcd://a', user: me}", "$.registry.user: "),
        ("registry: {url: 'etcd://a', password_file: f}", "$.registry.user: "),
        ("registry: {ca_file: f}", "$.registry.ca_file: only an etcd"),
        ("registry: {url: 'sqlite:///'}", "$.registry.url: "),
    ],
)
def test_values_that_do_not_fit_together(text: str, start: str) -> None:
    """What would fail at the first request is refused before any port is opened."""
    assert error_of(text).startswith(start)


def test_free_ports_do_not_clash() -> None:
    """Port 0 twice means two free ports."""
    config = parse_config("front_door: {port: 0}\nadmin: {port: 0}")

    assert (config.front_door.port, config.admin.port) == (0, 0)
