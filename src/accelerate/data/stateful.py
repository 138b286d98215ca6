"""States of torchdata's `StatefulDataLoader`: the position in them, and whether the loader can continue from them."""

from __future__ import annotations

from typing import Any


def holds_dataset_state(state: Any) -> bool:
    """Whether a state of a `StatefulDataLoader` contains one of its dataset or of the dataset's iterator."""
    if not isinstance(state, dict):
        return False
    parts = (state.get("dataset_state"), state.get("dataset_iter_state"))
    return any(part is not None for part in parts) or any(holds_dataset_state(part) for part in state.values())


def restores_stream(state: dict[str, Any]) -> bool:
    """Whether torchdata's loader finds the position in a stream again from a state, now and when it is saved once more.

    It reads a stream without a state again from the beginning, and then counts those batches twice. A worker that has
    reached the end is asked again, and its stream may have returned to the beginning.
    """
    if batches_read(state) is None:
        return True  # of a loader that is not torchdata's
    workers = _workers(state).values()
    ended = any((worker.get("fetcher_state") or {}).get("fetcher_ended") for worker in workers)
    return holds_dataset_state(state) and not ended


def batches_read(state: dict[str, Any]) -> int | None:
    """Return the batches of the epoch behind a state of torchdata's loader, 0 at its end; None for another loader's state."""
    if state.get("_iterator_finished"):
        return 0
    if "_snapshot" in state:
        return state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"]
    return state.get("_num_yielded")


def with_unread_workers(state: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any] | None:
    """Return a state in which workers that have read nothing since `loaded` was loaded keep their state of `loaded`.

    Their own is that of a stream whose generator has not started yet, which is often the beginning. None: all have read.
    """
    workers, before = _workers(state), _workers(loaded)
    now, then = state.get("_snapshot", {}), loaded.get("_snapshot", {})
    if not workers or now["_snapshot_step"] - then["_snapshot_step"] >= len(workers):
        return None
    first, read = then["_last_yielded_worker_id"] + 1, now["_last_yielded_worker_id"] - then["_last_yielded_worker_id"]
    have_read = {f"worker_{(first + number) % len(workers)}" for number in range(read % len(workers))}
    kept = {name: worker if name in have_read else before.get(name, worker) for name, worker in workers.items()}
    return {**state, "_snapshot": {**now, "_worker_snapshots": kept}}


def _workers(state: dict[str, Any]) -> dict[str, Any]:
    return state.get("_snapshot", {}).get("_worker_snapshots", {})
