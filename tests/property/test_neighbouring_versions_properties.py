"""What dsched processes write for each other is read by their neighbours in version (ADR 7).

The classes are found from what is decoded, so that one that is added is held to the same.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect as mi
import pytest
from first_forms import FIRST_FORMS
from hypothesis import given, settings
from hypothesis import strategies as st

from dsched.cli.workers import WorkersAnswer
from dsched.drivers.wire import AgentCommand, AgentMessage, SamplingParams
from dsched.registry import EngineRow, InstanceRow, LeaderRow
from dsched.registry.peer_channel import PeerNews
from dsched.registry.records import UnreadableRow, read_row

ROOTS = (AgentMessage, AgentCommand, PeerNews, InstanceRow, EngineRow, LeaderRow, WorkersAnswer)


def types_in(kind: mi.Type) -> Iterator[mi.Type]:
    """The type and all that it is made of, as far as messages use them."""
    yield kind
    match kind:
        case mi.StructType():
            for field in kind.fields:
                yield from types_in(field.type)
        case mi.UnionType():
            for each in kind.types:
                yield from types_in(each)
        case mi.VarTupleType():
            yield from types_in(kind.item_type)
        case mi.DictType():
            yield from types_in(kind.value_type)
        case mi.TupleType():
            pytest.fail(f"a tuple of {len(kind.item_types)} cannot grow; make it a Struct")
        case _:
            assert isinstance(kind, LEAVES), f"say here what a {type(kind).__name__} is"


LEAVES = (
    mi.IntType, mi.StrType, mi.FloatType, mi.BoolType, mi.NoneType, mi.BytesType, mi.LiteralType
)  # fmt: skip


def struct_types() -> dict[str, mi.StructType]:
    """All classes that are written for other processes, by name."""
    found = [each for root in ROOTS for each in types_in(mi.type_info(root))]
    return {each.cls.__name__: each for each in found if isinstance(each, mi.StructType)}


STRUCTS = struct_types()


def values(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Any value of a type."""
    match kind:
        case mi.StructType():
            fields = {field.name: values(field.type) for field in kind.fields}
            return st.fixed_dictionaries(fields).map(lambda drawn: kind.cls(**drawn))
        case mi.UnionType():
            return st.one_of([values(each) for each in kind.types])
        case mi.VarTupleType():
            return st.lists(values(kind.item_type), max_size=2).map(tuple)
        case mi.DictType():
            return st.dictionaries(st.text(max_size=5), values(kind.value_type), max_size=2)
        case mi.LiteralType():
            return st.sampled_from(kind.values)
        case mi.IntType():
            top = (1 << 62) - 1 if kind.lt is None and kind.le is None else None
            return st.integers(kind.ge, top if top is not None else kind.le or kind.lt - 1)
        case mi.FloatType():
            return st.floats(kind.ge, kind.le, allow_nan=False)
        case mi.BytesType():
            return st.binary(max_size=5)
        case mi.BoolType():
            return st.booleans()
        case mi.NoneType():
            return st.none()
    return st.text(max_size=5)


ADDED = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
"""What a newer dsched may say in a field of its own."""


def grow(value: object, draw: st.DrawFn) -> object:
    """The value as builtins, each struct with fields that no class here has."""
    if isinstance(value, tuple):
        return [grow(each, draw) for each in value]
    if not isinstance(value, msgspec.Struct):
        return value
    config = value.__struct_config__
    said = {name: grow(getattr(value, name), draw) for name in value.__struct_fields__}
    if config.array_like:
        return [*said.values(), *draw(st.lists(ADDED, max_size=2))]
    if config.tag is not None:
        said[config.tag_field] = config.tag
    more = {f"new_{name}": each for name, each in draw(
        st.dictionaries(st.text(max_size=3), ADDED, max_size=2)).items()}  # fmt: skip
    return {**more, **said} if draw(st.booleans()) else {**said, **more}


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_no_class_refuses_fields_that_are_not_known(name: str) -> None:
    assert not STRUCTS[name].forbid_unknown_fields


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_what_the_first_version_wrote_is_read(name: str) -> None:
    """A field that was added since has a default."""
    form = FIRST_FORMS[name]

    for codec in (msgspec.msgpack, msgspec.json):
        read = codec.decode(codec.encode(form), type=STRUCTS[name].cls)
        assert isinstance(read, STRUCTS[name].cls)


def test_every_class_has_its_first_form_and_no_other() -> None:
    assert set(FIRST_FORMS) == set(STRUCTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STRUCTS))
@given(data=st.data())
@settings(max_examples=40)
def test_fields_of_a_newer_version_change_nothing(name: str, data: st.DataObject) -> None:
    """Wherever they stand, whatever they hold."""
    kind = STRUCTS[name]
    value = data.draw(values(kind))
    grown = data.draw(st.composite(lambda draw: grow(value, draw))())

    for codec in (msgspec.msgpack, msgspec.json):
        assert codec.decode(codec.encode(grown), type=kind.cls) == value


def test_a_sampling_parameter_that_is_not_known_stays_an_error() -> None:
    """It is part of a request in the journal: without it the answer would be another."""
    with pytest.raises(msgspec.ValidationError, match="unknown field `top_pp`"):
        msgspec.json.decode(b'{"max_tokens": 1, "top_pp": 0.5}', type=SamplingParams)


@given(st.binary(max_size=40), st.sampled_from([InstanceRow, EngineRow, LeaderRow]))
def test_any_bytes_are_a_row_or_a_reason(value: bytes, kind: type[InstanceRow]) -> None:
    row = read_row(value, kind)

    assert isinstance(row, UnreadableRow)
    assert row.reason


def test_a_row_that_nests_without_end_is_a_reason() -> None:
    """It would be ignored, but not even that can be done."""
    value = b'{"instance_id": "i", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"

    row = read_row(value, LeaderRow)

    assert isinstance(row, UnreadableRow)
    assert "recursion" in row.reason
