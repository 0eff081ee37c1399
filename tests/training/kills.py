"""Kills a run again and again: `python kills.py FOLDER STEPS KILLS SEED`.

FOLDER holds model/ and data/ of `tiny_run`. The run goes to FOLDER/killed; FOLDER/whole becomes the
same run without a kill. Prints a line for each kill. Every attempt is forked from this process,
which has imported all that takes long and not yet started jax.
"""

import os
import pathlib
import random
import signal
import sys
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
KINDS = ("while saving", "at any time", "after a step")
TEMPORARY = "*.orbax-checkpoint-tmp*"


def begin(config, workdir):
    """Starts an attempt; returns its process."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    log = os.open(workdir.with_suffix(".log"), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        training.train(config, workdir)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def last_step(workdir):
    """Steps that were logged; each is."""
    path = workdir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def reached(workdir, step, since):
    """Whether a step has been logged since."""
    path = workdir / "metrics.jsonl"
    return path.exists() and path.stat().st_mtime > since and last_step(workdir) >= step


def complete(workdir):
    """Updates done in the latest complete checkpoint."""
    folders = (workdir / "checkpoints").glob("*")
    return max((int(path.name) for path in folders if path.name.isdecimal()), default=0)


def saving(workdir, since):
    """Whether a checkpoint is being written that was begun after `since`."""
    for path in (workdir / "checkpoints").glob(TEMPORARY):
        try:
            if path.stat().st_mtime > since:
                return True
        except FileNotFoundError:
            pass
    return False


def attempt(config, workdir, hit):
    """Runs until `hit(start)`, or to the end; returns whether it was killed."""
    start = time.time()
    process = begin(config, workdir)
    while not hit(start):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            assert status == 0, workdir.with_suffix(".log").read_text()
            return False
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return True


def main(folder, steps, kills, seed):
    chance, workdir = random.Random(int(seed)), folder / "killed"
    config = make_run(folder / "model", folder / "data", steps=int(steps))
    whole, logged = folder / "whole", []

    def first_line(start):
        if not logged and reached(whole, 1, start):
            logged.append(time.time() - start)
        return False

    attempt(config, whole, first_line)
    for number in range(int(kills)):
        kind = KINDS[number % 3]
        step, delay = complete(workdir) + chance.randint(2, 6), chance.random()
        wait = delay * (logged[0] if kind == "at any time" else 0.05)

        def hit(start, kind=kind, step=step, wait=wait):
            if kind != "at any time" and not reached(workdir, step, start):
                return False
            if kind == "while saving" and not saving(workdir, start):
                return False
            time.sleep(wait)
            return True

        killed = attempt(config, workdir, hit)
        torn = len(list((workdir / "checkpoints").glob(TEMPORARY)))
        told = f"killed {kind}, {torn} torn" if killed else "ended"
        print(f"{number}: {told} after step {last_step(workdir)}", flush=True)
    attempt(config, workdir, lambda start: False)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "support"), str(HERE.parents[1])]
    import conftest

    os.environ["XLA_FLAGS"] = " ".join(conftest.FLAGS[1:])
    # The first run compiles, the others need not.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(pathlib.Path(sys.argv[1], "programs"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    from jax._src import xla_bridge
    from tiny_run import make_run

    from stepprune_jax import training
    from stepprune_jax.command_line import show_messages

    show_messages("stdout")
    assert not xla_bridge._backends
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
