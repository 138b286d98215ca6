"""Copies of the training state in host memory, on this machine and on a peer, from which restarted ranks resume.

A copy is a checkpoint of `save_state` with a folder on each machine, in a RAM file system. The training thread pays for a snapshot in host
memory and for two small reductions. A thread writes the snapshot; then the first ranks of the machines, the leaders, send the folders
around a ring: machine i to machine i + 1. The copy before is removed once every rank knows that the new one is complete.
"""

import json
import os
import threading
import time
import weakref
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from accelerate import comm
from accelerate.base._warn import warn_user
from accelerate.checkpoint import manifest
from accelerate.checkpoint.manifest import FileEntry, Manifest
from accelerate.checkpoint.save import SavePlan, unlisted
from accelerate.checkpoint.state import mapped_leaves
from accelerate.comm.in_step import ends_are_uneven
from accelerate.extension import Extension
from accelerate.extensions.async_save.background import Background
from accelerate.extensions.async_save.copies import snapshot
from accelerate.extensions.peer_memory.folder import PARTIAL, Incoming, MemoryFolder, exchange
from accelerate.extensions.peer_memory.options import Cadence, PeerMemoryKwargs
from accelerate.extensions.peer_memory.ranks import MachineRanks, raise_any
from accelerate.extensions.peer_memory.shards import LocalShardsIO
from accelerate.runtime.failure import LAUNCHER
from accelerate.strategies.sharded_io import FSDP2IO
from accelerate.strategies.state_io import StateIO
from accelerate.training import saving

# The file of a checkpoint, in memory or not, with the number of optimizer steps before it.
_STEPS_FILE = "optimizer_steps.json"


class _CopiedRun:
    """An Accelerator whose checkpoints are written and read by another `StateIO`."""

    def __init__(self, run: Any, state_io: StateIO) -> None:
        self._original, self._state_io = run, state_io

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class PeerMemory(Extension):
    """Makes copies of the training state.

    Attributes:
        ranks: The ranks by machine.
        folder: The copies on this machine.
        cadence: When copies are made, and what they cost.
        complete: The save that is known to be complete on all ranks; it stays until another one is.
        loaded_steps: Optimizer steps before the checkpoint that was loaded last; None if it does not have them.
    """

    folder: MemoryFolder

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        options: PeerMemoryKwargs = run.peer_memory_handler
        self.ranks = MachineRanks(run.process_index, run.local_process_index, run.num_processes)
        self.cadence = Cadence(options)

        def open_folder() -> None:
            self.folder = MemoryFolder(options.folder)
            if self.ranks.leads:
                self.folder.open()

        self.ranks.together(open_folder)
        self.complete: str | None = None
        self.loaded_steps: int | None = None
        self._pending: str | None = None  # the save of the copy that is being written
        self._due: list[weakref.ref[Any]] = []  # the loaders of the loop in which a copy became due
        self._background, self._written = Background(), threading.Event()

    @classmethod
    def attach(cls, run: Any) -> "PeerMemory | None":
        """Return the extension of a run that torch's elastic launcher can restart, else None with a warning.

        Collective: call on every rank.
        """
        has_launcher = LAUNCHER in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
        if run.num_processes == 1 or not has_launcher or comm.side_group() is None:
            warn_user(
                "PeerMemoryKwargs makes no copies here: it needs several ranks, which a launcher restarts, and gloo. Start them with "
                "accelerate launch --num_processes N --max_restarts M."
            )
            return None
        return cls(run)

    def registered(self, kind: str, prepared: Any, evaluation: bool) -> None:
        """Refuse a strategy whose state is not copied.

        Collective: call on every rank.
        """
        self.copied_run()

    def step_ends(self, optimizer: Any) -> None:
        """Count a step of the first optimizer."""
        run = self.run
        if run._optimizers and optimizer is not run._optimizers[0]:
            return
        if ends_are_uneven():  # not counted either: ranks take different numbers of these steps
            return
        self.cadence.step_ended(self._written.is_set())
        if self.cadence.is_due:
            self._due = list(run.gradient_state._active)

    def between_batches(self, loader: Any) -> None:
        """Make a copy if one is due, once the step is over; not in an evaluation.

        Collective: call on every rank.
        """
        if self._due and any(getattr(due(), "_progress", None) is loader._progress for due in self._due):
            self._due = []
            self._copy()

    def saving(self, plan: Any) -> None:
        """Add the number of steps to a checkpoint."""
        if plan.writes_shared:
            plan.add_bytes(_STEPS_FILE, json.dumps({"steps": self.cadence.steps}).encode())

    def loading(self, folder: str) -> None:
        """Read the number of steps from a checkpoint."""
        path = Path(folder, _STEPS_FILE)
        self.loaded_steps = int(json.loads(path.read_text())["steps"]) if path.is_file() else None

    def released(self) -> None:
        """Wait for the copy in flight."""
        self.wait()

    def ended(self) -> None:
        """Wait for the copy in flight, before the process group is destroyed."""
        self.wait()

    def wait(self) -> RuntimeError | None:
        """Wait for the copy in flight; return why it failed, or None. Not a collective."""
        return self._background.wait()

    # -- a copy --------------------------------------------------------------------------------------------------------

    def _copy(self) -> None:
        ranks, cadence, began = self.ranks, self.cadence, time.perf_counter()
        problem: BaseException | None = self.wait()
        cadence.settle()
        waited_s = time.perf_counter() - began
        numbers = problem is not None, cadence.cost_s, cadence.step_s, time.time()
        failed, cost_s, step_s, stamp = ranks.largest(*numbers)
        raise_any(problem, failed)
        # Every rank has come here without a problem, so the copy before is complete on all of them.
        self.complete, self._pending = self._pending or self.complete, None

        began = (
            time.perf_counter() - waited_s
        )  # without the wait for slower ranks, which the next step would have, too
        save = f"{datetime.fromtimestamp(stamp, timezone.utc):%Y%m%dT%H%M%SZ-}{int(stamp % 1 * 1e6):05x}"
        run = self.copied_run()
        plan = SavePlan(self.folder.partial(self.folder.local_copies, save), ranks.rank, ranks.leads)
        problem = self._collect(run, plan)
        failed, stall_s = ranks.largest(problem is not None, time.perf_counter() - began)
        raise_any(problem, failed)
        cadence.agree(max(stall_s, cost_s), step_s)
        self._pending, facts = save, saving._facts(run)
        self._written.clear()
        self._background.start(lambda: self._write(plan, save, facts), what=f"in memory of step {cadence.steps}")
        cadence.copied(time.perf_counter() - began)

    def copied_run(self) -> Any:
        """Return the run as it writes and reads copies; ValueError for a strategy without them. Not a collective."""
        state_io = self.run._state_io
        if type(state_io) not in (StateIO, FSDP2IO):
            raise ValueError(
                f"PeerMemoryKwargs copies replicas (DDP) and shards of FSDP2; the strategy is {self.run._strategy.name!r}. Remove "
                "PeerMemoryKwargs, or save with save_state(blocking=False)."
            )
        return _CopiedRun(self.run, LocalShardsIO() if type(state_io) is FSDP2IO else state_io)

    def _collect(self, run: Any, plan: SavePlan) -> Exception | None:
        """Put a snapshot of the state into a plan; return why that failed.

        Collective: call on every rank.
        """
        problem: Exception | None = None
        try:
            saving._add_states(run, plan, saving._run_hooks(run, plan), True, {})
        except Exception as error:  # the others would wait
            problem = error
        try:
            if not self.cadence.stalls_s:  # the first copy of this start
                self._require_room(plan)
            if problem is None:
                snapshot(plan, self._background.buffers)
        except Exception as error:
            problem = problem or error
        return problem

    def _require_room(self, plan: SavePlan) -> None:
        sizes: list[int] = []
        mapped_leaves(plan.contents(), lambda leaf: sizes.append(getattr(leaf, "nbytes", 0)))
        of_machines, machine = self.ranks.of_machines(sum(sizes)), self.ranks.machine
        self.folder.require_room(of_machines[machine], of_machines[machine - 1] if len(of_machines) > 1 else 0)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _write(self, plan: SavePlan, save: str, facts: dict[str, Any]) -> None:
        """Write the files of this rank; leaders publish the machine's copy and send it around."""
        ranks, folder, problem = self.ranks, self.folder, None

        def publish() -> None:
            if problem is not None:
                raise problem
            self._publish(plan, entries, save, facts)

        try:
            entries = self._write_files(plan, save)
        except BaseException as error:  # the other leaders would wait
            entries, problem = {}, error
        try:
            if ranks.leaders is None:
                if ranks.leads or problem is not None:
                    publish()
                return
            ranks.together(publish, ranks.leaders)
            local, target = os.path.join(folder.local_copies, save), ranks.leader(ranks.machine + 1)
            incoming = Incoming(ranks.leader(ranks.machine - 1), folder.partial(folder.peer_copies, save), local)
            ranks.together(lambda: exchange(ranks.leaders, (local, target), incoming), ranks.leaders)
            folder.publish(folder.peer_copies, save)
        finally:
            self._written.set()

    def _write_files(self, plan: SavePlan, save: str) -> dict[str, FileEntry]:
        """Write the files of all ranks of the machine, once there is room for them; return the entries of this rank's."""
        ranks, folder, entries = self.ranks, self.folder, dict[str, FileEntry]()

        def make_room() -> None:
            for of_kind in (folder.local_copies, folder.peer_copies):
                folder.keep(of_kind, [self.complete, PARTIAL + save])

        def write() -> None:
            entries.update(plan.write(threads=1))
            if not ranks.leads:
                manifest.write_part(plan.folder, ranks.rank, entries, plan.create)

        ranks.together(make_room if ranks.leads else lambda: None, ranks.neighbours)
        ranks.together(write, ranks.neighbours)
        return entries

    def _publish(self, plan: SavePlan, entries: dict[str, FileEntry], save: str, facts: dict[str, Any]) -> None:
        ranks = self.ranks
        others = [rank for rank in ranks.machines[ranks.machine] if rank != ranks.rank]
        files = {**entries, **manifest.gathered(manifest.parts(plan.folder, others, len(others)))}
        files |= unlisted(plan.folder, files, ranks.rank)
        Manifest(files, save=save, **facts).write(plan.folder)
        self.folder.publish(self.folder.local_copies, save)
