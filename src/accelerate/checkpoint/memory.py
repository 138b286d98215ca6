"""Memory for many bytes at once."""

import mmap

import torch

# Below this a page more or less does not matter.
_LARGE = 4 << 20
_HUGE_PAGE = 2 << 20


def fresh(size: int) -> torch.Tensor:
    """Return memory that nobody has touched, as bytes, with arbitrary content.

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
    except OSError:  # a kernel without them
        pass
    return torch.frombuffer(area, dtype=torch.uint8, count=size)
