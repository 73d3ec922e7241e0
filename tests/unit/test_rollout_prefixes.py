from async_rl.services.rollout.prefixes import Prefills


def test_followers_go_when_the_prompt_is_computed():
    prefills: Prefills[str] = Prefills()
    assert prefills.enter((1, 2), "a")
    assert not prefills.enter((1, 2), "b")
    assert not prefills.enter((1, 2), "c")
    assert prefills.enter((9,), "other")
    assert prefills.waiting == ["b", "c"]
    assert prefills.leave((1, 2), "a") == ["b", "c"]
    assert prefills.leave((1, 2), "a") == []
    assert prefills.enter((1, 2), "d")


def test_a_follower_that_leaves_is_not_called():
    prefills: Prefills[str] = Prefills()
    prefills.enter((1,), "a")
    prefills.enter((1,), "b")
    assert prefills.leave((1,), "b") == []
    assert prefills.leave((1,), "a") == []


def test_clearing_gives_back_everyone_who_waited():
    prefills: Prefills[str] = Prefills()
    for request in "abc":
        prefills.enter((1,), request)
    assert prefills.clear() == ["b", "c"]
    assert prefills.enter((1,), "b")
