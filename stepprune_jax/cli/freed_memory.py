"""Keeps freed memory in the process, which makes programs on a CPU faster."""

import ctypes
import os
import sys

# Parameters of `mallopt`, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# glibc returns memory to the system above this number of free bytes at the end of the heap, and
# returns larger blocks at once.
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory instead of returning it to the system.

    XLA allocates the temporary memory of a program in each call. By default, glibc returns a large
    block to the system when the block is freed, and the system clears the pages of the next block.
    Only the heap of the main thread can keep large blocks, so all threads share this heap.

    Does nothing without glibc, or if environment variables configure glibc's `malloc`.
    """
    is_set_by_user = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if sys.platform != "linux" or is_set_by_user:
        return
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return
    library.mallopt(_ARENA_MAX, 1)
    library.mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
    library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
