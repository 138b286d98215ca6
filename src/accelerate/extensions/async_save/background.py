"""Saving while the training continues: one save at a time, in a thread, from copies in host memory.

The thread meets the other ranks through the key-value store of the process group, so it takes part in no collective of the training.
Hashing, copying and writing release the interpreter lock. The thread rests between blocks as long as no other thread waits for it. Its
priority is that of any other thread: a thread of a low priority that holds the interpreter lock would delay the training for longer.
"""

import copy
import logging
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from accelerate.checkpoint import plain_data
from accelerate.checkpoint.save import SavePlan
from accelerate.checkpoint.state import empty_on_host_like, is_distributed_tensor, local_part, local_tensor, quietly
from accelerate.runtime import durable, torch_private
from accelerate.runtime.exit import run_last

logger = logging.getLogger(__name__)

# How long the thread rests after each block, as a multiple of the time that the block took: the training is slowed for longer, but
# by little at a time.
_REST = 3.0

# -- copies ------------------------------------------------------------------------------------------------------------


@quietly()
@torch.no_grad()
def snapshot(plan: SavePlan, buffers: "HostBuffers") -> None:
    """Replace all that a plan has by copies in host memory of `buffers`, which takes it back when copying fails."""
    try:
        plan.replace(_Snapshot(buffers).of)
        buffers.synchronize()
    except BaseException:
        buffers.release()
        raise


class HostBuffers:
    """Host memory for the copies of one save at a time, used again by the next one; pinned where a GPU is copied."""

    def __init__(self) -> None:
        self._free: dict[Any, list[Any]] = {}
        self._taken: list[tuple[Any, Any]] = []
        self._devices: set[torch.device] = set()

    def _take(self, key: Any, make: Callable[[], Any]) -> Any:
        free = self._free.get(key)
        self._taken.append((key, free.pop() if free else make()))
        return self._taken[-1][1]

    def copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy of a storage; of an accelerator's it is complete after `synchronize`."""
        size, pinned = storage.nbytes(), storage.device.type == "cuda"
        memory: torch.Tensor = self._take(
            (size, pinned), lambda: torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        )
        dtype = torch.uint8 if size % 4 else torch.int32  # torch copies single bytes slower
        source = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
        memory.view(dtype).copy_(source, non_blocking=pinned)
        if pinned:
            self._devices.add(storage.device)
        return memory.untyped_storage()

    def shell(self, value: torch.Tensor) -> torch.Tensor:
        """Return a DTensor or ShardedTensor of the host with a value's knowledge of the whole, and memory that is not filled."""
        spread = [getattr(value, name, None) for name in ("device_mesh", "placements")]
        key = type(value), *spread, value.size(), value.dtype, local_part(value).shape
        memory: torch.Tensor = self._take(key, lambda: empty_on_host_like(value))
        return memory

    def synchronize(self) -> None:
        """Wait until the copies are complete."""
        while self._devices:
            torch.cuda.synchronize(self._devices.pop())

    def release(self) -> None:
        """Keep the memory for the next save, once: no thread reads the copies any more. What this save did not use is let go."""
        taken, self._taken = self._taken, []
        if taken:
            self._free = {}
            for key, buffer in taken:
                self._free.setdefault(key, []).append(buffer)


class _Snapshot:
    """Copies nested objects into host memory: views of one storage as views of one copy, and each object once."""

    def __init__(self, buffers: HostBuffers) -> None:
        self._buffers = buffers
        self._storages: dict[tuple[str, int, int], torch.UntypedStorage] = {}
        self._made: dict[int, tuple[Any, Any]] = {}  # with the original, so that its id stays its own

    def of(self, obj: Any) -> Any:
        return plain_data.rebuilt(obj, self._value)

    def _value(self, obj: Any) -> Any:
        if obj is None or isinstance(obj, (bool, int, float, complex, str, bytes)):
            return obj
        if id(obj) not in self._made:
            made = self._tensor(obj) if isinstance(obj, torch.Tensor) else plain_data.deep_copied(obj)
            self._made[id(obj)] = obj, made
        return self._made[id(obj)][1]

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_distributed_tensor(tensor):
            mine, made = local_part(tensor), self._buffers.shell(tensor)
            if type(mine) is torch.Tensor:
                local_tensor(made).set_(self._copied(mine), mine.storage_offset(), mine.shape, mine.stride())
            else:
                local_part(made).copy_(mine)
            return made
        tensor = tensor.detach()
        if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor or tensor.is_quantized:
            return copy.deepcopy(tensor).cpu()
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(self._copied(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            made = made.conj()
        return torch_private.neg_view(made) if tensor.is_neg() else made

    def _copied(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        key = (str(tensor.device), storage.data_ptr(), storage.nbytes())
        if key not in self._storages:
            self._storages[key] = self._buffers.copy(storage)
        return self._storages[key]


# -- one save at a time ------------------------------------------------------------------------------------------------


class Background:
    """The background save of one Accelerator, not pickled; `wait` has something to do while it is ``pending``."""

    def __init__(self) -> None:
        self.buffers = HostBuffers()
        self.pending = False
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._what = ""
        self._pid = os.getpid()
        self._hurry = threading.Event()  # a thread waits for the save

    def __reduce__(self) -> tuple[Any, ...]:
        return Background, ()

    def renew_buffers(self) -> None:
        """Release the memory of copies, once a save that is being written has ended."""
        self.buffers = HostBuffers()

    def start(self, task: Callable[[], None], what: str) -> None:
        """Run a task in a thread, or here where the interpreter is about to exit; `finish` raises its error.

        The interpreter waits for the thread before it exits. Then the memory of the copies is free again.
        """
        self.finish()

        def run() -> None:
            try:
                time.sleep(0)  # the caller continues first
                with durable.resting(_REST, self._hurry):
                    task()
                _unreported.discard(self)
            except BaseException as error:
                self._problem = error
                # Now, too: a training that ends or fails before its next call would never report it.
                logger.error("The checkpoint %s could not be saved in the background: %s", what, error)
            finally:
                self.buffers.release()

        self.pending, self._what, self._pid = True, what, os.getpid()
        self._hurry.clear()
        _unreported.add(self)
        thread = threading.Thread(target=run, name="accelerate-checkpoint", daemon=False)
        try:
            _wait_at_exit()
            thread.start()
        except RuntimeError:
            self._hurry.set()
            run()
            return
        self._thread = thread

    def finish(self) -> None:
        """Wait until the save in flight is written, and raise what went wrong, as RuntimeError.

        Not a collective.
        """
        if (problem := self.wait()) is not None:
            self.forget()
            raise problem

    def forget(self) -> None:
        """Let the error of the last save count as reported."""
        self.pending, self._problem = False, None
        _unreported.discard(self)

    def wait(self, reason: str | None = None) -> RuntimeError | None:
        """Wait until the save in flight is written; return what went wrong, also next time, until `forget`. `reason` names who waits."""
        self._join(reason)
        # Not before: a caller that is interrupted while it waits has not waited.
        self._thread, cause = None, self._problem
        if cause is None:
            self.forget()
            return None
        problem = RuntimeError(f"The checkpoint {self._what} could not be saved in the background: {cause}")
        problem.__cause__ = cause
        return problem

    def _join(self, reason: str | None = None) -> None:
        thread = self._thread
        if thread is None or self._pid != os.getpid():  # a fork has its parent's, which writes on
            return
        self._hurry.set()
        if reason is not None and thread.is_alive():
            logger.warning("%s waits for the checkpoint %s, which is still being written.", reason, self._what)
        thread.join()


# -- the end of the program ----------------------------------------------------------------------------------------

# Those that are saving, or whose last save failed and no call has reported it yet; their Accelerators may be gone.
_unreported: set[Background] = set()
_registered_in: int | None = None


def _wait_at_exit() -> None:
    """Let the interpreter wait for a save before it closes thread pools, which writing and the network use."""
    global _registered_in
    if _registered_in != os.getpid():
        if hasattr(threading, "_register_atexit"):
            import concurrent.futures.thread  # noqa: F401 (what is registered last is called first)

            threading._register_atexit(_join_all)
        if multiprocessing.parent_process() is not None:
            # Such a process leaves without a look at `atexit`, and first reports to the other ranks that it ends.
            multiprocessing.util.Finalize(None, _leave, exitpriority=1000)
        _registered_in = os.getpid()


def _join_all() -> None:
    for background in list(_unreported):
        background._join()


def _leave() -> None:
    """End with status 1 if a save failed that no call has reported, so that the program does not look successful."""
    _join_all()
    if all(background._pid != os.getpid() for background in _unreported):  # a fork has its parent's
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(1)


run_last(_leave)
