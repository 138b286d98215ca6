"""A progress bar that only one process per machine shows."""

from typing import Any

from accelerate.base import _lazy

__getattr__ = _lazy.aliases(__name__)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a ``tqdm.auto.tqdm`` progress bar, shown by the main process of each machine only.

    Any rank may call it.

    Args:
        *args: Passed to tqdm: the iterable, and what follows it.
        main_process_only: Whether the other processes hide their bars.
        **kwargs: Passed to tqdm. ``disable=True`` hides the bar everywhere.

    Raises:
        ValueError: The first argument is a bool, which is not iterable.
        ImportError: tqdm is not installed.

    Example:
        >>> [step for step in tqdm(range(2), disable=True)]
        [0, 1]
    """
    if args and isinstance(args[0], bool):
        raise ValueError(
            f"tqdm takes the iterable first, but got {args[0]!r}. Whether only the main process shows the bar is the "
            f"keyword argument main_process_only: tqdm(iterable, main_process_only={args[0]!r})."
        )
    # Imported here, because `import accelerate.utils` must stay light.
    try:
        from tqdm.auto import tqdm as progress_bar
    except ImportError as error:
        raise ImportError("The progress bar needs tqdm, which is not installed: `pip install tqdm`.") from error
    if main_process_only and not kwargs.get("disable"):
        from accelerate.process import PartialState

        kwargs["disable"] = PartialState().local_process_index != 0
    return progress_bar(*args, **kwargs)
