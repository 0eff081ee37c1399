"""What ends a program from outside lets a run save its state, unless it is to be ignored."""

import os
import signal

import pytest

from stepprune_jax.workdir.checkpoints import Interrupt


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_signal_is_a_request_unless_it_was_ignored(before):
    first = signal.signal(signal.SIGHUP, before)
    try:
        with Interrupt() as interrupt:
            assert not interrupt.requested
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupt.requested == (before == signal.SIG_DFL)
            assert interrupt.number in (0, signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, first)
