"""What ends a program from outside lets a run save its state, unless it is to be ignored."""

import os
import signal

import pytest

from stepprune_jax.workdir.checkpoints import Interrupt


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP])
def number(request):
    before = signal.getsignal(request.param)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_is_a_request(number):
    signal.signal(number, signal.SIG_DFL)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), number)
        assert interrupt.requested and signal.getsignal(number) == signal.SIG_DFL


def test_what_was_ignored_stays_ignored(number):
    signal.signal(number, signal.SIG_IGN)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), number)
        assert not interrupt.requested
