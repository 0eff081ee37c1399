"""Keeps freed memory in the process, which makes programs on a CPU faster."""

import ctypes
import os
import sys

# Parameters of `mallopt`, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# Bytes of freed memory at the end of the heap, above which glibc returns memory to the system.
# Larger blocks, such as weights, are returned when they are freed.
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory instead of returning it to the system.

    XLA allocates the temporary memory of a program in each call. By default, glibc returns large
    blocks to the system at once, so each call waits until the system has cleared its pages anew.
    In threads other than the main one, glibc can keep no large block, hence one heap for all
    threads. Does nothing without glibc, and where environment variables set up glibc's `malloc`.
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
