"""Memory for many bytes at once."""

import mmap
import time

import torch

# Below this a page more or less does not matter.
_LARGE = 4 << 20
_HUGE_PAGE = 2 << 20
# Filling a huge page with zeros takes a tenth of this.
_SLOW = 1e-3


def fresh(size: int) -> torch.Tensor:
    """Return memory of nobody else's, as bytes, with arbitrary content.

    The system hands memory out page by page when it is first touched, and with the usual small pages that takes longer than
    filling it. So large memory asks for huge ones, which Linux gives to those who ask.

    Args:
        size: how many bytes.

    Source:
        https://docs.kernel.org/admin-guide/mm/transhuge.html
    """
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    # Whole huge pages: the kernel aligns only such a mapping to them.
    area = mmap.mmap(-1, -(-size // _HUGE_PAGE) * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        area.madvise(mmap.MADV_HUGEPAGE)
        _touch(area)
    except OSError:  # a kernel without them
        pass
    return torch.frombuffer(area, dtype=torch.uint8, count=size)


def _touch(area: mmap.mmap) -> None:
    """Take the huge pages now, as long as they come quickly.

    A virtual machine may give free memory back to its host, and it is the huge pages that it gives back; to get one again takes
    milliseconds. Small pages are more likely to be still there.
    """
    slow = 0
    for start in range(0, len(area), _HUGE_PAGE):
        begun = time.thread_time()
        area[start] = 0
        slow += time.thread_time() - begun > _SLOW
        if slow == 2:  # one may be an accident
            rest = start + _HUGE_PAGE
            if rest < len(area):
                area.madvise(mmap.MADV_NOHUGEPAGE, rest)
            return
