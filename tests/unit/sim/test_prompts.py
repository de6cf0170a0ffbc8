"""PromptMaker: token ids for traces that hold only lengths."""

import dataclasses

import numpy as np
import pytest

from dsched.sim.prompts import PromptMaker, check_prompts
from dsched.sim.traces import Trace
from dsched.sim.workload import EmpiricalLength, FixedLength, generate_workload

LENGTHS = (1, 5, 8, 9, 600, 40_000)


@pytest.mark.parametrize("vocab_size", [2, 300, 1_567, 129_280])
def test_prompts_have_their_length_and_stay_in_the_vocabulary(vocab_size: int) -> None:
    trace = generate_workload(num_requests=30, prompt=EmpiricalLength(seen_tokens=LENGTHS))
    prompts = PromptMaker(trace, vocab_size=vocab_size, seed=0)

    for index in range(30):
        prompt = prompts.prompt(index)
        assert len(prompt) == trace.num_prompt_tokens[index]
        assert 0 <= min(prompt) <= max(prompt) < vocab_size


def test_prompts_differ_within_their_first_tokens() -> None:
    trace = generate_workload(num_requests=3_000, prompt=FixedLength(num_tokens=12))
    prompts = PromptMaker(trace, vocab_size=300, seed=0)

    assert len({prompts.prompt(index)[:2] for index in range(3_000)}) == 3_000


def test_another_seed_gives_other_prompts() -> None:
    trace = generate_workload(num_requests=2, prompt=FixedLength(num_tokens=50))
    one, same, other = (PromptMaker(trace, vocab_size=300, seed=seed) for seed in (1, 1, 2))

    assert one.prompt(1) == same.prompt(1) != other.prompt(1)


def with_blocks(lengths: list[int], blocks: list[list[int]]) -> Trace:
    trace = generate_workload(num_requests=len(lengths), prompt=FixedLength(num_tokens=1))
    return dataclasses.replace(
        trace,
        num_prompt_tokens=np.array(lengths, dtype=np.int32),
        block_ids=np.array([block for row in blocks for block in row], dtype=np.int64),
        block_offsets=np.cumsum([0, *map(len, blocks)], dtype=np.int64),
    )


def test_shared_blocks_are_shared_tokens() -> None:
    """The longest common prefix of two prompts is that of their blocks."""
    trace = with_blocks([1_100, 1_500, 1_100, 600], [[9, 14, 2], [9, 14, 16], [9, 14, 2], [14, 9]])
    prompts = PromptMaker(trace, vocab_size=1_000, seed=0)
    first, second, repeat, other = (prompts.prompt(index) for index in range(4))

    assert first[:1_024] == second[:1_024]
    assert first[1_024:] != second[1_024:1_100]
    assert first == repeat
    assert other[:8] != first[:8]
    assert [len(each) for each in (first, second, other)] == [1_100, 1_500, 600]


def test_request_without_blocks_beside_others_that_have_them() -> None:
    trace = with_blocks([100, 100, 700], [[], [3], [3]])
    prompts = PromptMaker(trace, vocab_size=1_000, seed=0)

    assert prompts.prompt(0) != prompts.prompt(1)
    assert prompts.prompt(2)[:100] == prompts.prompt(1)
    assert len(prompts.prompt(2)) == 700


def test_empty_and_unsorted_traces_cannot_be_replayed() -> None:
    with pytest.raises(ValueError, match=r"nothing to replay \(0 rows read, 0 dropped\)"):
        check_prompts(generate_workload(num_requests=0))
    trace = generate_workload(num_requests=2)
    with pytest.raises(ValueError, match="arrivals are not sorted"):
        check_prompts(dataclasses.replace(trace, arrival_ns=np.array([5, 0], dtype=np.int64)))
