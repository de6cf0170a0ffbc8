"""PrefixCache: whole blocks, by content up to their end, least recently used first out."""

from dsched.sim.prefix import PrefixCache

BLOCK = 512


def prompt(*blocks: int, rest: int = 0) -> tuple[int, ...]:
    return tuple(block for block in blocks for _ in range(BLOCK)) + (9,) * rest


def test_only_whole_leading_blocks_count() -> None:
    cache = PrefixCache(10 * BLOCK)
    cache.remember(prompt(1, 2, 3, rest=100))

    assert cache.num_cached_tokens(prompt(1, 2, 3, rest=100)) == 3 * BLOCK
    assert cache.num_cached_tokens(prompt(1, 2, 4)) == 2 * BLOCK
    assert cache.num_cached_tokens(prompt(1, 2)[:-1]) == BLOCK
    assert cache.num_cached_tokens(prompt(2, 3)) == 0
    assert cache.num_cached_tokens(prompt(1)[:100]) == 0


def test_oldest_goes_first_and_beginnings_stay_longest() -> None:
    cache = PrefixCache(3 * BLOCK)
    cache.remember(prompt(1, 2))
    cache.remember(prompt(3, 4))

    assert cache.num_cached_tokens(prompt(3, 4)) == 2 * BLOCK
    assert cache.num_cached_tokens(prompt(1, 2)) == BLOCK


def test_nothing_is_remembered_without_room_or_after_clearing() -> None:
    none, some = PrefixCache(BLOCK - 1), PrefixCache(BLOCK)
    for cache in (none, some):
        cache.remember(prompt(1))
    assert (none.num_cached_tokens(prompt(1)), some.num_cached_tokens(prompt(1))) == (0, BLOCK)

    some.clear()

    assert some.num_cached_tokens(prompt(1)) == 0
