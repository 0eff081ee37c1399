"""Signals that interrupt a run."""

import os
import signal

import pytest

from stepprune_jax.workdir.checkpoints import Interrupt


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_signal_is_recorded_unless_it_was_ignored(handler):
    previous = signal.signal(signal.SIGHUP, handler)
    try:
        with Interrupt() as interrupt:
            assert not interrupt.requested
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupt.requested == (handler == signal.SIG_DFL)
            assert interrupt.number in (0, signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, previous)
