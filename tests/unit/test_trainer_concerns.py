"""Field report 48: shares that stay high are said, once."""

from types import SimpleNamespace

from async_rl.services.trainer.concerns import IN_ROW, Concerns


def record(*, truncated=0.0, equal=0.0, voting=4, mismatch=None):
    return SimpleNamespace(
        truncated_share=truncated,
        zero_variance_share=equal,
        voting=voting,
        members=4,
        mismatch_by_lag=mismatch or {},
        stops={"eos": 1 - truncated, "length": truncated},
    )


def said(*records):
    concerns = Concerns()
    return [line for one in records for line in concerns.note(one)]


def test_a_limit_that_cuts_nearly_everything_is_said_once_with_its_setting():
    (line,) = said(*[record(truncated=0.97)] * 30)
    assert "97%" in line and "length 97%" in line and "sampling.max_new_tokens" in line
    assert said(*[record(truncated=0.97)] * (IN_ROW - 1)) == []


def test_it_is_said_again_after_it_was_gone():
    high, low = [record(truncated=0.6)] * IN_ROW, [record(truncated=0.1)]
    assert len(said(*high, *low, *high)) == 2
    assert said(*high[1:], *low, *high[1:]) == []


def test_equal_rewards_and_missing_votes():
    assert "no gradient" in said(*[record(equal=0.95)] * IN_ROW)[0]
    assert "no vote" in said(*[record(voting=1)] * IN_ROW)[0]
    assert said(*[record(equal=0.5, voting=3)] * 20) == []


def test_a_gap_between_sampler_and_trainer_that_stays_is_said():
    """Field report 26: of the freshest tokens; older ones differ because the policy has moved."""
    assert "mismatch KL of the freshest tokens is 0.3" in said(*[record(mismatch={0: (0.1, 0.3)})] * IN_ROW)[0]
    assert said(*[record(mismatch={1: (0.0, 0.001), 4: (0.2, 0.5)})] * 20) == []
