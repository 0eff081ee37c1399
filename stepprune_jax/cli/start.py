"""Starts the commands of the console scripts: parses the flags first, and ends on Ctrl-C."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from importlib import import_module
from types import FrameType

from stepprune_jax.cli.command_line import escape_output, one_line_errors, program
from stepprune_jax.cli.compile_notice import announcing_compiles
from stepprune_jax.extras import MissingPackageError, end_interrupted, explain

# Seconds that the main thread has for its reaction to Ctrl-C. Python reacts between two of its
# instructions, so a call of a compiler may delay the reaction by minutes.
_REACTION_SECONDS = 1.0
# Seconds until a command must have ended after Ctrl-C. Python drops a KeyboardInterrupt that is
# raised in a destructor, and the command would continue.
_END_SECONDS = 5.0
# jax's callback of the garbage collector. Python prints and drops an error of this callback.
_GC_CALLBACK = "_xla_gc_callback"
# Seconds after which an interrupt of this callback is raised again.
_RETRY_SECONDS = 0.05


def start(name: str, *, is_interruptible: bool) -> None:
    """Runs a command. Imports its module, and hence jax, only if its flags are valid.

    Args:
        name: name of the command's module in `cli` and in `cli.flags`.
        is_interruptible: whether Ctrl-C ends the command. `extras` handles it until the command
            runs.
    """
    escape_output()
    flags = import_module(f"stepprune_jax.cli.flags.{name}")
    script = program(flags.NAME)
    with one_line_errors(script):
        flags.parse()
        try:
            command = import_module(f"stepprune_jax.cli.{name}").command
        except ModuleNotFoundError as error:
            raise MissingPackageError(explain(error, name)) from error
    with announcing_compiles():
        if not is_interruptible:
            command()
            return
        with ending_on_interrupt(script):
            command()


@contextlib.contextmanager
def ending_on_interrupt(name: str) -> Iterator[None]:
    """Raises KeyboardInterrupt on Ctrl-C, and ends the process if the command does not end soon.

    A command does not react while it compiles a program or waits for a device.

    Args:
        name: name of the command, for the message.
    """
    is_raised, has_ended = threading.Event(), threading.Event()

    def raise_interrupt(signal_number: int, frame: FrameType | None) -> None:
        is_raised.set()
        if _is_in_gc_callback(frame):
            retry = threading.Timer(_RETRY_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
            retry.daemon = True  # Must not delay the end of the process.
            retry.start()
            return
        raise KeyboardInterrupt

    def watch(signals: socket.socket) -> None:
        """Waits for signals. Each byte of the socket is the number of a signal."""
        while received := signals.recv(1):
            # A command may have replaced the handler, for example to save a checkpoint first.
            has_handler = signal.getsignal(signal.SIGINT) is raise_interrupt
            is_interrupt = received[0] == signal.SIGINT and has_handler
            if is_interrupt and not (
                is_raised.wait(_REACTION_SECONDS) and has_ended.wait(_END_SECONDS)
            ):
                end_interrupted(name)

    reader, writer = socket.socketpair()
    writer.setblocking(False)  # `set_wakeup_fd` requires this.
    previous_handler = signal.signal(signal.SIGINT, raise_interrupt)
    previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=watch, args=[reader], name="stepprune-interrupts", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()
        signal.set_wakeup_fd(previous_fd)
        signal.signal(signal.SIGINT, previous_handler)
        writer.close()  # Ends the thread.


def _is_in_gc_callback(frame: FrameType | None) -> bool:
    """Returns whether a frame is that of jax's callback of the garbage collector, or below it."""
    while frame is not None:
        if frame.f_code.co_name == _GC_CALLBACK:
            return True
        frame = frame.f_back
    return False
