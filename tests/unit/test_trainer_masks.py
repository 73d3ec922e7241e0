"""What enters the loss: the bound, votes, truncation, non-finite log-probabilities."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import InvariantError
from async_rl.services.trainer.masks import Masked, loss_mask, require_bound
from async_rl.trajectory import Score
from tests.unit.trainer_material import trajectory

GRADED, VOTELESS = Score(1.0), Score(None, "failed")


def mask_of(t, score=GRADED, *, step=6, bound=2, on_exceed="mask", truncated="train"):
    return loss_mask(t, score, step=step, bound=bound, on_exceed=on_exceed, truncated=truncated)


def test_a_bound_of_n_accepts_lag_n_and_leaves_out_n_plus_one():
    """Field reports 4 and 5: consuming version minus the token's, judged at the draw."""
    mask = mask_of(trajectory([1], [2, 3, 4, 5], versions=[(3, 2), (4, 1), (6, 1)]))
    assert mask.lag.tolist() == [3, 3, 2, 0]
    assert mask.loss.tolist() == [False, False, True, True]
    assert mask.left_out["stale"] == 2


@pytest.mark.parametrize("on_exceed", ["wait", "drop"])
def test_a_stale_token_where_none_was_promised_is_an_error(on_exceed):
    with pytest.raises(InvariantError, match=r"lag 3 in the draw of step 6.*at most 2"):
        mask_of(trajectory([1], [2, 3], versions=[(3, 1), (5, 1)]), on_exceed=on_exceed)


def test_a_token_of_a_version_that_does_not_exist_yet_is_an_error():
    with pytest.raises(InvariantError, match="version 7 in the draw of step 6"):
        mask_of(trajectory([1], [2], versions=[(7, 1)]))


def test_a_stale_token_never_reaches_the_loss():
    loose = Masked(loss=np.array([True, True]), lag=np.array([0, 3]), left_out={})
    with pytest.raises(InvariantError, match="lag 3 would enter the loss; the bound is 2"):
        require_bound(loose, 2)


def test_non_finite_behaviour_logprobs_are_left_out_and_counted():
    """Field report 17: [-1, NaN, -2]."""
    mask = mask_of(trajectory([1], [2, 3, 4], logprobs=[-1.0, float("nan"), -2.0], versions=[(6, 3)]))
    assert mask.loss.tolist() == [True, False, True]
    assert mask.left_out["nonfinite"] == 1


def test_a_token_that_was_never_sampled_has_no_loss_entry():
    """Field report 17: what the framework appended is no action, so it has no place in the mask at all."""
    t = trajectory([1], [2, 3, 4], versions=[(6, 2)])
    t.action[-1] = False
    assert t.problems() is None
    assert mask_of(t).loss.tolist() == [True, True]


@pytest.mark.parametrize("stop", ["length", "context"])
def test_truncated_completions_leave_the_loss_where_asked(stop):
    t = trajectory([1], [2, 3], versions=[(6, 2)], stop=stop)
    assert mask_of(t).loss.all()
    masked = mask_of(t, truncated="mask")
    assert not masked.loss.any() and masked.left_out["truncated"] == 2


def test_a_member_without_a_vote_has_no_gradient():
    mask = mask_of(trajectory([1], [2, 3], versions=[(6, 2)]), VOTELESS)
    assert not mask.loss.any() and mask.left_out["voteless"] == 2


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=5),
    st.integers(0, 6),
    st.booleans(),
    st.sampled_from(["eos", "length"]),
    st.sampled_from(["train", "mask"]),
)
def test_every_token_is_trained_or_left_out_for_one_reason(spans, bound, votes, stop, truncated):
    count = sum(n for _, n in spans)
    t = trajectory([1], [2] * count, versions=spans, stop=stop, logprobs=[-1.0] * count)
    t.logprobs[2::2] = float("inf")
    mask = mask_of(t, GRADED if votes else VOTELESS, bound=bound, truncated=truncated)
    assert mask.loss.sum() + sum(mask.left_out.values()) == count
    assert not mask.loss.any() or mask.lag[mask.loss].max() <= bound
