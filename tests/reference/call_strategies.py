"""Hypothesis strategies for calls and for the pieces in which their text comes."""

from hypothesis import strategies as st

_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), _VALUES, max_size=3)
CUTS = st.lists(st.integers(0, 400), max_size=12)
"""Where a text of some hundred characters is cut."""
