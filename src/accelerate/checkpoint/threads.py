"""Work that is spread over a few threads, also where no more threads can be started."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def each(task: Callable[[Any], T], items: Iterable[Any], threads: int, name: str = "checkpoint") -> list[T]:
    """Return what a task returns for each item, in order. Any rank, alone.

    An interpreter that is about to exit starts no threads any more; then all is done in the one that calls.

    Args:
        task: called once with each item.
        items: what it is called with.
        threads: how many may be at work at a time.
        name: start of the threads' names.

    Raises:
        Exception: what the task raised first, in the order of the items; the others have ended, or have not begun.
    """
    items = list(items)
    if min(threads, len(items)) < 2:
        return [task(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix=name) as pool:
        try:
            futures = [pool.submit(task, items[0])]
        except RuntimeError:
            futures = []
        else:
            try:
                futures += [pool.submit(task, item) for item in items[1:]]
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [task(item) for item in items]
