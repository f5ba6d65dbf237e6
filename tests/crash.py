"""Kill a child process just before its n-th durable call."""

from __future__ import annotations

import os
from collections.abc import Callable

KILLED = 137
CALLS = ("fsync", "replace", "rename", "link", "unlink", "ftruncate", "mkdir")


def killed_at(
    limit: int | None, work: Callable[[Callable[[str], None]], object], calls: tuple[str, ...] = CALLS
) -> tuple[int, str, int]:
    """Run `work(say)` in a forked child that dies before durable call number `limit` (None: never).

    Returns the child's exit status (`KILLED`, 0, or 1 for an exception), all that it said, and how many durable calls it made
    (0 if it died).
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        write, seen = os.write, 0
        for name in calls:
            real = getattr(os, name)

            def counted(*args, _real=real, **kwargs):
                nonlocal seen
                seen += 1
                if seen == limit:
                    os._exit(KILLED)
                return _real(*args, **kwargs)

            setattr(os, name, counted)
        try:
            work(lambda text: write(writer, text.encode()))
        except BaseException:
            os._exit(1)
        write(writer, f"\0{seen}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said, _, made = stream.read().partition("\0")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said, int(made or 0)
