"""load_config: default < file < environment < flag; no value is lost for being false or empty."""

from pathlib import Path

import pytest

from dsched.config import Config, LoggingConfig
from dsched.config_load import DEFAULT, LoadedConfig, config_keys, load_config, parse_config
from dsched.config_text import doc_of, summary_of, to_rows, to_yaml


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_no_source_gives_the_defaults() -> None:
    """An empty configuration is the embedded simulated cluster, all values from `default`."""
    loaded = load_config()

    assert loaded.config == Config()
    assert loaded.config.pools == {}
    assert loaded.config.launch.engine == "sim"
    assert {loaded.origin(path) for path, _, _ in to_rows(loaded)} == {DEFAULT}


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}"])
def test_empty_file_is_the_defaults(tmp_path: Path, text: str) -> None:
    """A file without keys changes nothing."""
    assert load_config(write(tmp_path, text)).config == Config()


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    """The same key in all layers: the flag wins, and the origin says so; then one by one."""
    path = write(tmp_path, "front_door:\n  port: 1\n")
    environment = {"DSCHED_FRONT_DOOR_PORT": "2"}
    flags = {"front_door.port": "3"}

    by_flag = load_config(path, environment=environment, flags=flags)
    by_variable = load_config(path, environment=environment)
    by_file = load_config(path)

    assert [c.config.front_door.port for c in (by_flag, by_variable, by_file)] == [3, 2, 1]
    assert str(by_flag.origin("$.front_door.port")) == "--front-door-port"
    assert str(by_variable.origin("$.front_door.port")) == "$DSCHED_FRONT_DOOR_PORT"
    assert str(by_file.origin("$.front_door.port")) == f"{path}:2"


@pytest.mark.parametrize("word", ["false", "False", "no", "off", "0"])
@pytest.mark.parametrize("layer", ["environment", "flag"])
def test_false_overrides_true_of_the_file(tmp_path: Path, word: str, layer: str) -> None:
    """A flag or a variable can turn off what the file turned on."""
    path = write(tmp_path, "debug: {validate: true}")
    environment = {"DSCHED_DEBUG_VALIDATE": word} if layer == "environment" else {}
    flags = {"debug.validate": word} if layer == "flag" else {}

    loaded = load_config(path, environment=environment, flags=flags)

    assert loaded.config.debug.validate is False


def test_false_zero_and_empty_of_the_file_are_values(tmp_path: Path) -> None:
    """`false`, `0`, `''`, `[]` and `{}` override defaults that are none of these."""
    path = write(
        tmp_path,
        "metrics: {process: false}\n"
        "routing: {max_queued_requests: 0, policy_args: {}}\n"
        "front_door: {server_header: '', stop_grace_s: 0}\n"
        "launch: {args: []}\n",
    )

    config = load_config(path).config

    assert config.metrics.process is False
    assert config.routing.max_queued_requests == 0
    assert config.front_door.server_header == ""
    assert config.front_door.stop_grace_s == 0
    assert config.launch.args == ()


def test_empty_flag_text_is_a_value_and_empty_variable_is_not() -> None:
    """`--x ''` sets the empty text; a variable set to nothing is as if it were not set."""
    by_flag = load_config(flags={"front_door.server_header": ""})
    by_variable = load_config(environment={"DSCHED_FRONT_DOOR_SERVER_HEADER": ""})

    assert by_flag.config.front_door.server_header == ""
    assert by_variable.config.front_door.server_header == "dsched"
    assert by_variable.origin("$.front_door.server_header") == DEFAULT


@pytest.mark.parametrize(
    "text", ["front_door: {port: null}", "front_door: {port: }", "front_door: ~", "front_door:"]
)
def test_null_means_the_default(tmp_path: Path, text: str) -> None:
    """A key without a value keeps the default, and its origin is `default`."""
    loaded = load_config(write(tmp_path, text))

    assert loaded.config == Config()
    assert loaded.origin("$.front_door.port") == DEFAULT


def test_null_cannot_mean_two_things() -> None:
    """Every key that may be absent is absent by default, so `null` hides no other value."""
    for key in config_keys():
        if "None" in str(key.type):
            assert key.default is None, key.dotted


def test_variable_and_flag_carry_yaml_for_what_has_parts() -> None:
    """A mapping or list fits into one variable or flag, and replaces the whole."""
    pools = "{decode: {model: {name: m}, engines: [{url: 'http://a:1'}]}}"

    loaded = load_config(environment={"DSCHED_POOLS": pools}, flags={"launch.args": "[--x, '1']"})

    assert loaded.config.pools["decode"].engines[0].url == "http://a:1"
    assert loaded.config.launch.args == ("--x", "1")
    assert str(loaded.origin("$.pools.decode.engines[0].url")) == "$DSCHED_POOLS"
    assert loaded.origin("$.pools.decode.engines[0].model") == DEFAULT


def test_pools_of_a_flag_replace_those_of_the_file(tmp_path: Path) -> None:
    """No mixture: an engine of the file does not survive under the pools of a flag."""
    path = write(tmp_path, "pools: {old: {model: {name: m}, engines: [{url: 'http://a:1'}]}}")
    flags = {"pools": "{new: {model: {name: m}, engines: [{url: 'http://b:1'}]}}"}

    loaded = load_config(path, flags=flags)

    assert list(loaded.config.pools) == ["new"]
    assert not any("old" in origin_path for origin_path in loaded.origins)


def test_unknown_variable_is_a_warning_with_a_guess() -> None:
    """Other programs may use the prefix, so a misspelt variable warns and names the likely key."""
    loaded = load_config(environment={"DSCHED_FRONT_DOOR_PROT": "1", "DSCHED_ENDPOINT": "x"})

    assert loaded.warnings == (
        "DSCHED_FRONT_DOOR_PROT: no such key; did you mean `DSCHED_FRONT_DOOR_PORT`; ignored",
    )


def test_each_key_has_its_own_flag_and_variable() -> None:
    """No two keys share a flag or a variable, and a boolean's `--no-` is nobody's flag."""
    keys = config_keys()
    flags = [key.flag for key in keys]
    negated = [f"--no-{key.flag[2:]}" for key in keys if key.is_boolean]

    assert len(set(flags + negated)) == len(flags) + len(negated)
    assert len({key.variable for key in keys}) == len(keys)


def test_each_key_is_documented() -> None:
    """The text under a field is the help of its flag; none may miss, and each is a sentence."""
    for key in config_keys():
        assert doc_of(key).endswith("."), key.dotted
        assert summary_of(key)


def test_every_limit_says_what_goes_wrong_on_both_sides() -> None:
    """A limit named `max_…` or `…timeout…` tells the cost of a lower and of a higher value."""
    for key in config_keys():
        name = key.path[-1]
        if key.path[0] in ("sim", "metrics") or not (name.startswith("max_") or "timeout" in name):
            continue
        if name == "max_retained_requests":  # nothing breaks below
            continue
        assert "Below" in doc_of(key), key.dotted
        assert "Above" in doc_of(key) or "above" in doc_of(key), key.dotted


EVERYTHING = """
seed: 7
pools:
  long:
    role: prefill
    model: {name: "yes", tokenizer: ./tok, max_model_len: 131072}
    engines: [{id: p0, url: "http://p0:8000/v1", kind: sglang}]
  short:
    role: decode
    model: {name: "yes"}
    engines:
      - {url: "https://[::1]:9/x/", kv_capacity_tokens: 5, kind: sglang}
  tried:
    model: {name: tried}
    engines: [{kind: sim, num_dp_ranks: 4}]
routing: {policy: "json:JSONDecoder", policy_args: {strict: false}}
launch: {args: ["--a", "b: c", "'", "#"]}
front_door: {server_header: "ünïcode: #1"}
"""


def test_printed_configuration_reads_back_the_same(tmp_path: Path) -> None:
    """What `dsched check` prints is a file that means the same."""
    loaded = load_config(write(tmp_path, EVERYTHING))

    assert parse_config(to_yaml(loaded)) == loaded.config


def test_printed_configuration_names_the_origin_of_each_line(tmp_path: Path) -> None:
    """Each line with a value ends in a comment: file and line, variable, flag or `default`."""
    loaded = load_config(
        write(tmp_path, "seed: 4\nadmin:\n  port: 5\n"), flags={"front_door.port": "6"}
    )

    lines = {line.split("#")[0].strip(): line.split("# ")[-1] for line in _lines(loaded)}

    assert lines["seed: 4"].endswith("cluster.yaml:1")
    assert lines["port: 5"].endswith("cluster.yaml:3")
    assert lines["port: 6"] == "--front-door-port"
    assert lines["level: info"] == "default"


def _lines(loaded: LoadedConfig) -> list[str]:
    return to_yaml(loaded).splitlines()


def test_sections_are_frozen() -> None:
    """Nothing changes a configuration once it is read."""
    with pytest.raises(AttributeError):
        LoggingConfig().level = "debug"  # type: ignore[misc]
