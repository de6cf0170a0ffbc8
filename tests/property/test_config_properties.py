"""Configuration: what holds for every file, every value and every mixture of layers."""

import string
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dsched.config import Config
from dsched.config_load import LoadedConfig, config_keys, load_config, parse_config
from dsched.config_text import scalar_to_yaml, to_yaml
from dsched.errors import ConfigError

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 70), 1 << 70),
        st.floats(),
        st.text(max_size=8),
    ),
    lambda parts: st.one_of(
        st.lists(parts, max_size=3), st.dictionaries(st.text(max_size=6), parts, max_size=3)
    ),
    max_leaves=6,
)
SECTIONS = sorted({key.path[0] for key in config_keys()} | {"unknown"})
NAMES = sorted({key.path[-1] for key in config_keys()} | {"unknown", "two\nlines"})

INTEGER_KEYS = {
    "front_door.port": st.integers(0, 7_999),
    "sim.max_running_requests": st.integers(1, 1 << 20),
    "routing.max_queued_requests": st.integers(0, 1 << 20),
    "seed": st.integers(0, (1 << 63) - 1),
}


def read(text: str) -> Config | None:
    """Parse, or see that the refusal is one short line."""
    refusal = "$"
    config = None
    try:
        config = parse_config(text)
    except ConfigError as error:
        refusal = str(error)
    assert refusal.isprintable()
    assert refusal.startswith(("$", "line "))
    return config


@given(st.text(alphabet=st.characters(), max_size=80))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    """No file brings a traceback, whatever is in it."""
    read(text)


@given(st.text(alphabet=string.ascii_lowercase + ":{}[]&*!|>-'\"#%@` \n\t0", max_size=60))
def test_any_yaml_syntax_is_read_or_refused_in_one_line(text: str) -> None:
    """The same for text that is thick with YAML's signs."""
    read(text)


@pytest.mark.slow
@given(
    st.dictionaries(
        st.sampled_from(SECTIONS),
        st.one_of(VALUES, st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3)),
        max_size=3,
    )
)
@settings(max_examples=200)
def test_any_values_are_read_or_refused_with_a_path(tree: dict[str, object]) -> None:
    """Wrong types anywhere are refused by path; what is read reads back the same."""
    config = read(yaml.safe_dump(tree))

    if config is not None:
        printed = to_yaml(LoadedConfig(config=config, origins={}))
        assert parse_config(printed) == config


@pytest.mark.slow
@given(
    st.dictionaries(
        st.sampled_from(sorted(INTEGER_KEYS)), st.sets(st.integers(0, 2), min_size=1), min_size=1
    ),
    st.data(),
)
def test_the_highest_layer_wins_for_each_key_alone(
    layers_of: dict[str, set[int]], data: st.DataObject
) -> None:
    """Whatever mixture of file, variable and flag: each key has the value of its highest layer."""
    keys = {key.dotted: key for key in config_keys()}
    tree: dict[str, object] = {}
    environment: dict[str, str] = {}
    flags: dict[str, str] = {}
    expected: dict[str, tuple[int, str]] = {}
    for dotted, layers in sorted(layers_of.items()):
        for layer in sorted(layers):
            value = data.draw(INTEGER_KEYS[dotted])
            if layer == 0:
                *parents, name = dotted.split(".")
                section: dict[str, object] = tree
                for parent in parents:
                    section = section.setdefault(parent, {})  # type: ignore[assignment]
                section[name] = value
            elif layer == 1:
                environment[keys[dotted].variable] = str(value)
            else:
                flags[dotted] = str(value)
            expected[dotted] = (value, ("file", "environment", "flag")[layer])

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_text(yaml.safe_dump(tree))
        loaded = load_config(path, environment=environment, flags=flags)

    for dotted in INTEGER_KEYS:
        found: object = loaded.config
        for name in dotted.split("."):
            found = getattr(found, name)
        origin = loaded.origin(f"$.{dotted}").layer
        if dotted in expected:
            assert (found, origin) == expected[dotted]
        else:
            assert (found, origin) == (keys[dotted].default, "default")


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()))
def test_scalar_is_one_line_that_reads_back(value: object) -> None:
    """Also `"off"`, `"null"`, `"1e3"` and text with line ends stay what they are."""
    text = scalar_to_yaml(value)

    assert "\n" not in text
    assert yaml.safe_load(text) == value
