"""Commands keep freed memory, which a count of page faults shows."""

import sys

import pytest
from processes import run_python

# Allocates and frees 32 MB forty times in a thread, as XLA does, and prints the page faults.
COUNT_FAULTS = """
import resource, threading
from stepprune_jax.cli.freed_memory import keep_freed_memory

def allocate():
    for _ in range(40):
        b"x" * (1 << 25)

keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
thread = threading.Thread(target=allocate)
thread.start()
thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = (1 << 25) // 4096  # of one block

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")


def count_faults(**settings):
    return int(run_python("-c", COUNT_FAULTS, **settings).stdout)


def test_a_freed_block_is_used_again():
    assert count_faults() < 3 * PAGES


def test_settings_of_the_user_are_kept():
    assert count_faults(MALLOC_TOP_PAD_="131072") > 30 * PAGES
