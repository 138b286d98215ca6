"""Kills runs while they save, publish, prune and load, and breaks their disks; after each time a whole checkpoint must be there.

The program imports everything once and forks: processes that train, save and are killed, and for each of them one that has
never seen anything, which loads what is left and compares it. All that a checkpoint holds is a function of the step that it
claims, so a loader can compute what must be in it.
"""

import argparse
import contextlib
import dataclasses
import errno
import faulthandler
import functools
import itertools
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist
from crash_points import PHASES, Board, Plan, Points, die_with_parent, mount_small_disk
from crash_state import Chain, Run

from accelerate.checkpoint import ranks as checkpoint_ranks
from accelerate.checkpoint.manifest import CHECKPOINTS_FOLDER, DamagedCheckpoint
from accelerate.checkpoint.storage import storage_of
from accelerate.state import AcceleratorState, GradientState

SAVES, LIMIT_S = 3, 60
# How the process ends: all steps done; stopped after a failure, as told; the others are gone.
DONE, STOPPED, ALONE = 0, 4, 5


def train(chain: Chain, plan: Plan, board: Board, rank: int) -> int:
    """Load, take some steps, and save after each; the plan may end it anywhere. Returns how it ended."""
    points = Points(board, rank, plan if plan.rank == rank else None)
    points.install(plan.exchanges)
    run = Run(chain)

    def guarded(act: Callable[[], object], phase: str) -> bool:
        """Whether it went well. An injected failure must come out as an error, and leave the state alone."""
        before = run.step
        try:
            with points.during(phase):
                act()
            return True
        except (OSError, RuntimeError) as error:
            if plan.kind == "kill":
                raise
            board["refused", rank] += 1
            points.plan = None
            traceback.print_exc()
            assert str(error), "an error without a message"
            run.check(before)
            return False

    def load(missing_ok: bool) -> bool:
        """Load; what was passed over because it could not be read is there when it can be read again."""
        went_well = guarded(lambda: run.load(missing_ok), "load")
        if plan.kind == "fail" and board["fired", plan.rank] and (went_well or not plan.leaves):
            points.plan = None
            run.load(missing_ok)
        return went_well

    if not load(missing_ok=True) and plan.leaves:
        return STOPPED
    run.check()
    for _ in range(SAVES):
        step = run.advance()
        board["begun", rank] = step
        went_well = guarded(lambda: run.save(chain.blocking, plan.safe), "save")
        if plan.kind == "fail" and not chain.blocking and went_well:
            went_well = guarded(run.accelerator.wait_for_checkpoint, "save")
        if went_well:
            # One in the background is there when the next one begins.
            board["saved", rank] = step if chain.blocking or plan.kind == "fail" else step - 1
        elif plan.leaves:
            return STOPPED
        run.check(step)
        assert run.origin is None or chain.limit is None or run.origin.is_dir(), "what was loaded is gone"
        if plan.phase == "load":
            run.accelerator.wait_for_checkpoint()
            board["saved", rank] = step
            if not load(missing_ok=False) and plan.leaves:
                return STOPPED
            run.check(step)
    run.accelerator.wait_for_checkpoint()
    board["saved", rank] = max(board["saved", rank], run.step if plan.kind != "fail" else 0)
    return DONE


def verify(chain: Chain, board: Board, at_least: int, at_most: int, own: list[str]) -> int:
    """Load what is there as a fresh process, and compare. Returns the exit status."""
    run = Run(chain)
    if not run.load(missing_ok=at_least == 0):
        assert at_least == 0, "no checkpoint is there"
        return DONE
    step = run.check()
    assert at_least <= step <= at_most, f"step {step} was loaded, from {at_least} to {at_most} can be there"
    board["loaded", 0], board["whole", 0] = step, 1
    run.advance(chain.world)
    if chain.limit is None:
        found = [path.read_text() for path in chain.folder.glob("**/notes.txt")]
        assert found == own, f"the user's own file is {found}"
        return DONE
    former = None
    for _, place in storage_of(chain.folder / CHECKPOINTS_FOLDER).checkpoints():
        state = place.state()
        assert state.kind == "complete", (place, state)
        run.accelerator.load_state(place.location)
        claimed = run.check()
        assert former is None or former < claimed, f"{place} has step {claimed}, the one before it {former}"
        former, board["whole", 0] = claimed, board["whole", 0] + 1
    assert former == step, "the newest one was not taken"
    return DONE


def check_tidy(chain: Chain) -> None:
    """After a run that came to its end nothing but checkpoints, and what is the user's own, is there."""
    hidden = list(chain.folder.rglob(".*"))
    assert not hidden, f"left behind: {hidden}"
    if chain.limit is not None:
        left = storage_of(chain.folder / CHECKPOINTS_FOLDER).checkpoints()
        assert len(left) <= chain.limit + 1, f"besides the one that was loaded there are {left}"
    if chain.limit is None:
        assert (chain.target / "notes.txt").read_text() == "mine"
        assert len(list(chain.target.glob("more_*"))) == 1, "files of a former checkpoint are in the new one"


class Lab:
    """Forks, kills, and keeps the accounts; all that is drawn follows from a seed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        self.kills = Counter({f"in {phase}": 0 for phase in PHASES})
        self.failures: Counter[str] = Counter()
        self.whole = 0
        self._rounds = itertools.count()

    def fork(self, act: Callable[[], int], log: Path) -> int:
        """Run something in a fork; returns its process id. What it says goes into a file."""
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            signal.alarm(0)
            die_with_parent()
            faulthandler.enable()
            faulthandler.register(signal.SIGUSR1)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1), os.dup2(output, 2)
            status = act()
        except BaseException as error:
            traceback.print_exc()
            status = ALONE if isinstance(error, RuntimeError) and not isinstance(error, DamagedCheckpoint) else 1
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)

    @functools.cached_property
    def port(self) -> int:
        """Return the port of a process that holds the ranks' key-value store, as a launcher does; it dies with this one."""
        reading, writing = os.pipe()

        def serve() -> int:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(writing, str(store.port).encode())
            signal.pause()
            return DONE

        self.fork(serve, self.folder / "store.log")
        os.close(writing)
        port = int(os.read(reading, 16))
        os.close(reading)
        return port

    @contextlib.contextmanager
    def limit(self, pids: list[int], what: str, log: Path) -> Iterator[None]:
        """Kill processes that hang, and fail."""

        def late(*_: object) -> None:
            for pid in pids:
                os.kill(pid, signal.SIGUSR1)  # they write down where they are
            time.sleep(1)
            raise TimeoutError(f"{what}: still running after {LIMIT_S} s\n{log.read_text()[-8000:]}")

        signal.signal(signal.SIGALRM, late)
        signal.alarm(LIMIT_S)
        try:
            yield
        finally:
            signal.alarm(0)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def run(self, chain: Chain, plan: Plan, board: Board) -> bool:
        number = next(self._rounds)
        log = self.folder / f"run_{number}.log"
        port = self.port if chain.world > 1 else 0

        def act(rank: int) -> int:
            if chain.world > 1:
                _be_rank(rank, chain.world, port, number)
            return train(chain, plan, board, rank)

        running, killed = [self.fork(functools.partial(act, rank), log) for rank in range(chain.world)], False
        with self.limit(running, f"{chain}, {plan}", log):
            while running:
                pid, status = os.waitpid(running[0], 0) if len(running) == 1 else os.wait()
                if pid not in running:
                    raise RuntimeError("the process with the store has ended")
                running.remove(pid)
                if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                    # The remaining ranks must find out, and report it.
                    killed = True
                    if plan.leaves:
                        for other in running:
                            os.kill(other, signal.SIGKILL)
                    continue
                code = os.waitstatus_to_exitcode(status)
                expected = (DONE, STOPPED) if plan.kind == "fail" else (DONE, ALONE) if killed else (DONE,)
                if code not in expected:
                    raise AssertionError(f"{chain}, {plan}: exit status {code}\n{log.read_text()[-6000:]}")
        return killed

    def inspect(self, chain: Chain, own: list[str], at_least: int, at_most: int, about: object) -> int:
        """Load what is there in a fresh process; returns the step that was found."""
        seen, log = Board(), self.folder / f"look_{next(self._rounds)}.log"
        running = [self.fork(lambda: verify(chain, seen, at_least, at_most, own), log)]
        with self.limit(running, str(chain), log):
            _, status = os.waitpid(running[0], 0)
            running.clear()
        if status != 0:
            tree = "\n".join(str(path) for path in sorted(chain.folder.rglob("*")))
            raise AssertionError(f"{chain}, after {about}: nothing whole\n{log.read_text()[-6000:]}\n{tree}")
        self.whole += seen["whole", 0]
        return seen["loaded", 0]


def _be_rank(rank: int, world: int, port: int, number: int) -> None:
    """Be a process that a launcher has started, and meet the others in the store that the launcher holds."""
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in variables.items()})
    # The last remaining rank finds out at once.
    checkpoint_ranks.ASK_WRITERS_AFTER_S = checkpoint_ranks.ASK_WRITERS_AGAIN_S = checkpoint_ranks.ASK_AFTER_S = 0.2
    # A store serves all runs, each under a separate prefix.
    store = dist.PrefixStore(f"run {number}", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store)


class Story:
    """A chain of runs, and what is known of it."""

    def __init__(self, lab: Lab, chain: Chain) -> None:
        self.lab, self.chain = lab, chain
        chain.folder.mkdir(parents=True, exist_ok=True)
        self.at_least = self.at_most = 0
        self.own: list[str] = []  # what the user has put into the folder
        self.calls = {"save": 150, "publish": 30, "prune": 20, "load": 30}

    def plan(self, kind: str, phase: str) -> Plan:
        draw = self.lab.draw
        return Plan(
            kind,
            phase,
            number=draw.randint(1, self.calls[phase]),
            after=draw.random() < 0.5,
            error=draw.choice([errno.ENOSPC, errno.EIO]),
            lasts=draw.random() < 0.5,
            # What one process does for all is not done by the others.
            rank=draw.randrange(self.chain.world) if phase in ("save", "load") else 0,
            exchanges=draw.random() < 0.6,
            safe=draw.random() < 0.8,
            leaves=draw.random() < 0.5,
        )

    def go(self, plan: Plan) -> tuple[Board, bool]:
        """Start the next run, and look at what it leaves; returns its numbers, and whether it was killed."""
        board = Board()
        killed = self.lab.run(self.chain, plan, board)
        ranks = range(self.chain.world)
        self.at_least = max(self.at_least, *(board["saved", rank] for rank in ranks))
        self.at_most = max(self.at_most, *(board["begun", rank] for rank in ranks))
        if not killed and plan.kind != "fail":
            for phase in PHASES:
                self.calls[phase] = max(1, *(board[phase, rank] for rank in ranks))
        notes = self.chain.target / "notes.txt"
        if self.chain.limit is None and notes.parent.is_dir() and not self.own:
            try:
                notes.write_text("mine")
                self.own = ["mine"]
            except OSError:  # on a disk that is full there is no room for the user's own either
                notes.unlink(missing_ok=True)
        self.at_least = self.lab.inspect(self.chain, self.own, self.at_least, self.at_most, plan)
        return board, killed

    def kill(self, phase: str) -> bool:
        plan = self.plan("kill", phase)
        board, killed = self.go(plan)
        if killed:
            self.lab.kills[f"in {board.phase(plan.rank)}"] += 1
        return killed

    def fail(self, phase: str) -> bool:
        plan = self.plan("fail", phase)
        board, _ = self.go(plan)
        if board["fired", plan.rank]:
            self.lab.failures[f"{errno.errorcode[plan.error]} in {phase}"] += 1
        return bool(board["fired", plan.rank])

    def finish(self) -> None:
        """Let a run come to its end, which puts everything in order."""
        _, killed = self.go(Plan())
        assert not killed
        check_tidy(self.chain)


def chains(folder: Path) -> list[Chain]:
    kinds = itertools.product((1, 2), (True, False), (None, 1, 2))
    return [Chain(folder / f"chain_{number}", *kind) for number, kind in enumerate(kinds)]


def rounds(stories: list[Story], wanted: int, act: Callable[[Story, str], bool]) -> None:
    """Go round the stories and the phases until so many attempts came about."""
    stories[0].lab.draw.shuffle(stories)
    done, begun = 0, {}
    for cycle in itertools.count():
        for story in stories:
            # Two processes take longer.
            if done < wanted and (story.chain.world == 1 or cycle % 3 == 0):
                phases = begun.setdefault(id(story), itertools.cycle(_phases(story.chain)))
                done += act(story, next(phases))
        if done == wanted:
            break
    for story in stories:
        if id(story) in begun:
            story.finish()


def _phases(chain: Chain) -> list[str]:
    return ["publish", "save", "load"] if chain.limit is None else ["save", "prune", "publish", "prune", "load"]


def warm_up(folder: Path) -> None:
    """Import everything and run it once, so that forks begin at once; no thread and no group remain."""
    chain = Chain(folder / "warm")
    run = Run(chain)
    run.advance()
    run.save(True, True), run.save(False, False)
    run.load()
    run.check()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    import torch.nn.parallel.distributed  # noqa: F401

    deadline = time.monotonic() + 5
    while len(tasks := os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
        os.sched_yield()  # a thread that was joined is gone a moment later
    assert threading.active_count() == 1 and len(tasks) == 1, (threading.enumerate(), tasks)


def fill_disks(lab: Lab, sizes: int) -> str:
    """Save on file systems that are too small, until they are full; returns what there is to say."""
    board, disk = Board(), lab.folder / "disk"
    unable = 77

    def on_disk(size: int, chain: Chain) -> int:
        try:
            mount_small_disk(str(disk), size)
        except OSError:
            return unable
        story = Story(lab, chain)
        for _ in range(2):
            plan = dataclasses.replace(story.plan("fail", "save"), number=1 << 30, leaves=False)
            seen, _ = story.go(plan)
            board["refused", 0] += seen["refused", 0]
        return DONE

    disk.mkdir()
    for number in range(sizes):
        size = lab.draw.randrange(60_000, 240_000)
        chain = Chain(disk / "chain", 1, number % 2 == 0, (None, 1, 2)[number % 3])
        log = lab.folder / f"disk_{number}.log"
        status = os.waitstatus_to_exitcode(os.waitpid(lab.fork(functools.partial(on_disk, size, chain), log), 0)[1])
        if status == unable:
            return "full disks: skipped, this user may not mount one"
        assert status == DONE, f"a disk of {size} bytes\n{log.read_text()[-8000:]}"
    return f"full disks: {sizes}, {board['refused', 0]} saves refused, the last checkpoint whole on each"


def tried(lab: Lab, kind: str, wanted: int, act: Callable[[Story, str], bool], found: Counter[str]) -> None:
    """Make so many attempts, and print what came about."""
    begun = time.monotonic()
    rounds([Story(lab, chain) for chain in chains(lab.folder / kind)], wanted, act)
    told = ", ".join(f"{count} {name}" for name, count in found.items())
    print(f"{found.total()} {kind}: {told} ({time.monotonic() - begun:.0f} s)", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("kills", "failures", "disks", "seed"):
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    warm_up(folder)
    lab = Lab(folder, options.seed)
    print(f"seed {options.seed}", flush=True)
    tried(lab, "kills", options.kills, Story.kill, lab.kills)
    tried(lab, "failures", options.failures, Story.fail, lab.failures)
    print(fill_disks(lab, options.disks), flush=True)
    print(f"ok {lab.whole} checkpoints loaded, all whole", flush=True)
