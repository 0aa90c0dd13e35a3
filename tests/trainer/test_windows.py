"""The order of the data, seen from outside: who reads what, when, and how often."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.windows import (
    WindowError,
    WindowOrder,
    Windows,
    eval_windows,
    permute,
    unpermute,
)

JUST_ABOVE_POWERS_OF_FOUR = [4**k + 1 for k in range(9)]  # where a width that is too small shows
FIRST_STEP = [(1, 1736), (1, 1136), (1, 1688), (1, 888)]
STEP_200 = [(1, 858), (1, 370), (1, 1802), (1, 1754)]  # of epoch 2, whose phase is 2


def small_order(
    num_tokens: tuple[int, ...] = (100, 0, 7, 300),
    context: int = 8,
    global_windows: int = 6,
    seed: int = 1,
) -> WindowOrder:
    return WindowOrder(
        num_tokens=num_tokens, context=context, global_windows=global_windows, seed=seed
    )


@st.composite
def orders(draw: st.DrawFn) -> WindowOrder:
    """Orders with at least one step in an epoch."""
    context = draw(st.integers(1, 12))
    longest = draw(st.integers(context + 1, 150))
    others = draw(st.lists(st.integers(0, 150), max_size=4))
    num_tokens = tuple(draw(st.permutations([longest, *others])))
    num_windows = sum(max(0, tokens - 1) // context for tokens in num_tokens)
    return WindowOrder(
        num_tokens=num_tokens,
        context=context,
        global_windows=draw(st.integers(1, min(num_windows, 12))),
        seed=draw(st.integers(0, 2**40)),
    )


def pairs(windows: Windows) -> list[tuple[int, int]]:
    return list(zip(windows.bin_index.tolist(), windows.start_token.tolist(), strict=True))


def read_in_epoch(order: WindowOrder, epoch: int) -> list[tuple[int, int]]:
    """All windows of an epoch, in the order in which its steps read them."""
    step = 0
    while order.epoch_of(step)[0] < epoch:
        step += 1
    steps = range(step, step + order.steps_in(epoch))
    return [pair for step in steps for pair in pairs(order.windows_for(step))]


# ------------------------------------------------------------------ the bijection


@given(size=st.integers(1, 2**17), key=st.text(max_size=8))
@settings(max_examples=25, deadline=None)
def test_permute_reaches_every_index_once_and_unpermute_undoes_it(size: int, key: str) -> None:
    """Otherwise some window would be read twice while another is never read."""
    index = np.arange(size)
    permuted = permute(index, size, key)
    assert np.array_equal(np.sort(permuted), index)
    assert np.array_equal(unpermute(permuted, size, key), index)


@pytest.mark.parametrize("size", [2, 3, 4, *JUST_ABOVE_POWERS_OF_FOUR, 2**17 - 1, 2**17])
def test_permute_is_a_bijection_where_the_width_of_the_network_changes(size: int) -> None:
    """A width taken from the largest index loses one window of 65,537 and repeats another."""
    index = np.arange(size)
    permuted = permute(index, size, "a key")
    assert np.array_equal(np.sort(permuted), index)
    assert np.array_equal(unpermute(permuted, size, "a key"), index)


def test_a_part_of_a_permutation_equals_the_same_part_of_the_whole() -> None:
    """Positions are fetched in blocks: the block size must not show in the order."""
    whole = permute(np.arange(5000), 5000, "key")
    assert np.array_equal(permute(np.arange(1234, 1300), 5000, "key"), whole[1234:1300])


def test_a_permutation_of_hundreds_of_millions_stays_a_bijection_where_it_is_looked_at() -> None:
    """The Pile has 146 million windows of 2,048 tokens: nothing of that length is ever built."""
    size = 146_484_375
    index = np.arange(size - 20_000, size)
    permuted = permute(index, size, "key")
    assert permuted.min() >= 0
    assert permuted.max() < size
    assert len(np.unique(permuted)) == len(index)
    assert np.array_equal(unpermute(permuted, size, "key"), index)


def test_orders_of_neighbouring_seeds_and_epochs_are_unrelated() -> None:
    """Keys added instead of hashed make epoch 1 of seed 2 the same as epoch 2 of seed 1."""
    size = 4096
    ranks = [np.arange(size)]
    for seed in range(4):
        order = small_order((size + 1,), context=1, global_windows=64, seed=seed)
        ranks += [np.array([start for _, start in read_in_epoch(order, e)]) for e in range(4)]
    correlation = np.corrcoef(ranks) - np.eye(len(ranks))
    assert np.abs(correlation).max() < 5 / np.sqrt(size)  # five standard deviations of chance


# ------------------------------------------------------------------ an epoch


@given(order=orders(), epoch=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_an_epoch_reads_every_window_once_but_its_last_incomplete_step(
    order: WindowOrder, epoch: int
) -> None:
    """What is left out or repeated would weigh documents by accident."""
    read = read_in_epoch(order, epoch)
    phase, stride = order.phase(epoch), order.context
    every = {
        (bin_index, start)
        for bin_index, tokens in enumerate(order.num_tokens)
        for start in range(phase, tokens - order.context, stride)
    }
    assert len(every) == order.num_windows(epoch)
    assert len(read) == len(set(read))
    assert set(read) <= every
    assert len(every) - len(read) == order.num_windows(epoch) % order.global_windows


@given(order=orders(), epoch=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_a_label_is_predicted_at_most_once_in_an_epoch(order: WindowOrder, epoch: int) -> None:
    """Windows that overlap by more than one token would train on some labels twice."""
    labels = [
        (bin_index, start + i)
        for bin_index, start in read_in_epoch(order, epoch)
        for i in range(1, order.context + 1)
    ]
    assert len(labels) == len(set(labels))
    assert all(token < order.num_tokens[bin_index] for bin_index, token in labels)


def test_epochs_differ_in_order_and_in_where_the_windows_are_cut() -> None:
    """The second epoch would otherwise show the very same windows again."""
    order = small_order((5000,), context=32, global_windows=4)
    epochs = [read_in_epoch(order, epoch) for epoch in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert order.phase(0) == 0
    assert len({order.phase(epoch) for epoch in range(1, 20)}) > 5
    assert all(0 <= order.phase(epoch) < 32 for epoch in range(200))


def test_a_phase_that_would_leave_no_step_is_not_taken() -> None:
    """A bin of exactly one window loses it to any phase: the epoch would have no step, for ever."""
    order = small_order((9,), context=8, global_windows=1)
    assert [order.steps_in(epoch) for epoch in range(20)] == [1] * 20
    assert order.epoch_of(1000) == (1000, 0)


@given(order=orders())
@settings(max_examples=30, deadline=None)
def test_steps_count_through_the_epochs(order: WindowOrder) -> None:
    """A resumed run looks its epoch up from the step alone."""
    walked = [(epoch, inside) for epoch in range(5) for inside in range(order.steps_in(epoch))]
    assert [order.epoch_of(step) for step in range(len(walked))] == walked


# ------------------------------------------------------------------ ranks


@given(order=orders(), step=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_ranks_share_a_step_without_overlap_whatever_their_number(
    order: WindowOrder, step: int
) -> None:
    """The same run on 1, 2 or 8 GPUs must see the same data in the same step."""
    alone = pairs(order.windows_for(step))
    assert len(set(alone)) == order.global_windows
    for world_size in range(1, order.global_windows + 1):
        if order.global_windows % world_size == 0:
            shares = [order.windows_for(step, rank, world_size) for rank in range(world_size)]
            assert [pair for share in shares for pair in pairs(share)] == alone


def test_four_ranks_read_320_different_windows_in_ten_steps() -> None:
    """H14: equal seeds made every rank read the same batches."""
    order = small_order((30_000,), context=64, global_windows=32)

    def starts() -> list[int]:
        return [
            start
            for step in range(10)
            for rank in range(4)
            for start in order.windows_for(step, rank, 4).start_token.tolist()
        ]

    read = starts()
    assert len(read) == len(set(read)) == 320
    assert np.diff(sorted(read)).min() >= 64  # no label is shared
    assert starts() == read


def test_a_number_of_ranks_that_does_not_divide_the_batch_is_refused() -> None:
    """A rounded share would drop or repeat windows without a word."""
    with pytest.raises(WindowError, match="global_windows 6 is not divisible by 4 ranks"):
        small_order(global_windows=6).windows_for(0, 0, 4)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, world_size: int) -> None:
    """It would read past the step's share: windows of the next step, or none."""
    with pytest.raises(WindowError, match=f"rank {rank} of {world_size} ranks"):
        small_order().windows_for(0, rank, world_size)


def test_a_negative_step_is_refused() -> None:
    """Python's negative indices would quietly give windows of another step."""
    with pytest.raises(WindowError, match="step -1: steps count from 0"):
        small_order().windows_for(-1)


# ------------------------------------------------------------------ resume


def test_a_resumed_run_reads_what_the_uninterrupted_one_would_have_read() -> None:
    """H16: a seed set anew on resume brought the first batches again."""
    straight = [pairs(small_order().windows_for(step)) for step in range(20)]
    resumed = [pairs(small_order().windows_for(step)) for step in range(10, 20)]
    assert resumed == straight[10:]


def test_the_order_does_not_depend_on_what_was_asked_before() -> None:
    """A trace asks for steps out of order while the cache holds those of another epoch."""
    order = small_order((3000,), context=8, global_windows=2, seed=3)
    forward = {step: pairs(order.windows_for(step)) for step in range(700)}
    for step in range(693, -1, -7):
        assert pairs(order.windows_for(step)) == forward[step]


def test_the_order_is_the_same_today_as_when_it_was_laid_down() -> None:
    """Another numpy or another mixing would silently reorder the runs that are under way."""
    order = small_order((1000, 2000), context=8, global_windows=4, seed=5)
    assert pairs(order.windows_for(0)) == FIRST_STEP
    assert pairs(order.windows_for(200)) == STEP_200


def test_facts_name_what_the_order_depends_on_and_survive_json() -> None:
    """A resume compares them: another batch or seed is another order."""
    facts = small_order().facts([("00", "ab"), ("01", "cd")])
    assert facts == {
        "global_windows": 6,
        "context": 8,
        "seed": 1,
        "bins": [["00", "ab"], ["01", "cd"]],
    }
    assert json.loads(json.dumps(facts)) == facts


# ------------------------------------------------------------------ the way back


@given(order=orders(), epoch=st.integers(0, 2), data=st.data())
@settings(max_examples=80, deadline=None)
def test_steps_of_finds_every_reading_of_a_span_and_no_other(
    order: WindowOrder, epoch: int, data: st.DataObject
) -> None:
    """The answer to "when was this document trained on" must be what the steps really read."""
    bin_index = data.draw(st.integers(0, len(order.num_tokens) - 1))
    first = data.draw(st.integers(0, order.num_tokens[bin_index]))
    end = data.draw(st.integers(first, order.num_tokens[bin_index]))
    expected = []
    epoch_start = sum(order.steps_in(earlier) for earlier in range(epoch))
    for step in range(epoch_start, epoch_start + order.steps_in(epoch)):
        for place, (bin_read, start) in enumerate(pairs(order.windows_for(step))):
            overlaps = first < end and start < end and first < start + order.context + 1
            if bin_read == bin_index and overlaps:
                expected.append((start, step, place))
    found = order.steps_of(epoch, bin_index, first, end)
    rows = zip(found.start_token.tolist(), found.step.tolist(), found.place.tolist(), strict=True)
    assert list(rows) == sorted(expected)


def test_the_place_inside_a_step_gives_the_rank() -> None:
    """`trace` names the rank that saw a document, for the world size the step was run with."""
    order = small_order((2000,), context=8, global_windows=8)
    found = order.steps_of(0, 0, 500, 501)
    for step, place, start in zip(found.step, found.place, found.start_token, strict=True):
        share = order.windows_for(int(step), rank=int(place) // 2, world_size=4)
        assert start in share.start_token


# ------------------------------------------------------------------ few tokens


@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_a_split_shorter_than_a_window_is_refused_with_the_numbers(tokens: int) -> None:
    """H15: it ended in an obscure range error, or trained on padding."""
    with pytest.raises(WindowError) as refusal:
        small_order((tokens,), context=8, global_windows=1)
    for part in ("train split", f"{tokens} tokens in 1 bin", "0 windows of 9 tokens", "needs 1"):
        assert part in str(refusal.value)


def test_nine_tokens_give_exactly_one_window_of_context_eight() -> None:
    """H15: x = 0..7, y = 1..8, nothing more and nothing less."""
    order = small_order((9,), context=8, global_windows=1)
    assert order.num_windows(0) == 1
    assert pairs(order.windows_for(0)) == [(0, 0)]


def test_short_bins_beside_longer_ones_give_no_window_and_are_named() -> None:
    """H15: the loop warns about them instead of dying."""
    order = small_order((0, 1, 8, 9, 100), context=8, global_windows=2)
    assert order.short_bins == (0, 1, 2)
    assert order.num_windows(0) == 1 + 12
    assert {bin_index for bin_index, _ in read_in_epoch(order, 0)} <= {3, 4}


def test_fewer_windows_than_one_step_are_refused_with_both_numbers() -> None:
    """Such a run would never reach its first step."""
    with pytest.raises(WindowError, match=r"12 windows of 9 tokens .* needs 13"):
        small_order((100,), context=8, global_windows=13)


# ------------------------------------------------------------------ evaluation


@given(
    num_tokens=st.lists(st.integers(0, 120), min_size=1, max_size=4),
    context=st.integers(1, 9),
    limit=st.integers(1, 40),
)
@example(num_tokens=[9], context=8, limit=1)
@settings(max_examples=60, deadline=None)
def test_evaluation_takes_different_windows_spread_over_the_split(
    num_tokens: list[int], context: int, limit: int
) -> None:
    """The first windows alone would measure the first documents alone."""
    every = [
        (bin_index, start)
        for bin_index, tokens in enumerate(num_tokens)
        for start in range(0, tokens - context, context)
    ]
    if not every and sum(num_tokens):
        with pytest.raises(WindowError, match="the val split"):
            eval_windows(num_tokens, context, limit)
        return
    taken = pairs(eval_windows(num_tokens, context, limit))
    assert len(taken) == min(limit, len(every))
    steps = np.diff([every.index(pair) for pair in taken])
    assert steps.size == 0 or steps.max() - steps.min() <= 1


def test_an_empty_validation_split_gives_no_windows() -> None:
    """Training without validation works."""
    assert len(eval_windows((), 8, 10)) == 0
    assert len(eval_windows((0, 0), 8, 10)) == 0


def test_a_validation_split_without_a_window_is_refused_with_the_numbers() -> None:
    """H15: it would be evaluated on nothing."""
    with pytest.raises(WindowError) as refusal:
        eval_windows((8, 1), 8, 10)
    for part in ("val split", "9 tokens in 2 bins", "9 tokens (data.context 8 + 1)"):
        assert part in str(refusal.value)
