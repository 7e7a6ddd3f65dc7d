"""Silent peers, fed with times."""

from jdistgrad.rpc.liveness import Liveness


def test_a_silent_peer_is_asked_and_then_given_up():
    liveness = Liveness(interval=1.0, limit=3.0)
    assert liveness.look([4], 10.0) == ([], [])
    assert liveness.look([4], 10.9) == ([], [])
    assert liveness.look([4], 11.0) == ([4], [])
    assert liveness.look([4], 11.5) == ([], [])
    assert liveness.look([4], 12.0) == ([4], [])
    assert liveness.look([4], 13.0) == ([], [4])


def test_a_sign_of_life_starts_the_time_anew():
    liveness = Liveness(interval=1.0, limit=3.0)
    liveness.look([4], 0.0)
    liveness.heard(4, 2.5)
    assert liveness.look([4], 3.4) == ([], [])
    assert liveness.look([4], 5.4) == ([4], [])
    assert liveness.look([4], 5.5) == ([], [4])


def test_time_before_somebody_waits_does_not_count():
    liveness = Liveness(interval=1.0, limit=3.0)
    liveness.look([1], 0.0)
    liveness.look([], 1.0)
    assert liveness.look([1, 2], 100.0) == ([], [])
    assert liveness.look([1, 2], 101.0) == ([1, 2], [])
