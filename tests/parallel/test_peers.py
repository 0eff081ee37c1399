"""A process that falls silent is named; one that ends as it should is not."""

import pytest

from stepprune_jax.parallel.peers import Peers


class Store(dict):
    """As jax's, in one process."""

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite
        self[key] = value

    def key_value_try_get(self, key):
        if key not in self:
            raise RuntimeError(f"NOT_FOUND: {key}")
        return self[key]


def test_a_silent_process_is_named_once_and_again_when_it_is_back():
    store, now, said = Store(), [0.0], []
    one, two = (Peers(store, i, 3, said.append, lambda: now[0]) for i in range(2))
    for now[0] in map(float, range(0, 25, 5)):
        one.beat()
        two.beat()
    assert said == []
    two.leave()  # and the third never came
    for now[0] in map(float, range(25, 200, 5)):
        one.beat()
    (line,) = said
    assert line.startswith("process 2 of this run, on an unknown host, has not responded for 30")
    third = Peers(store, 2, 3, said.append, lambda: now[0])
    third.beat()
    one.beat()
    assert said[1:] == ["process 2 of this run is back"]
    for now[0] in map(float, range(200, 300, 5)):
        one.beat()
    assert (
        len(said) == 3 and said[2].startswith("process 2 of this run, on ") and "resumes" in said[2]
    )


def test_a_store_that_is_gone_is_an_error():
    class Gone(Store):
        def key_value_try_get(self, key):
            raise RuntimeError("UNAVAILABLE: connection refused")

    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        Peers(Gone(), 0, 2, print).beat()
