"""The heartbeat of one machine in a round of several: a thread that names a machine which does not answer. Imports torch."""

import json
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore

from accelerate.launch.errors import RunError

# How often a launcher says that it is there.
BEAT_S = 1.0


@dataclass(frozen=True)
class Member:
    """A machine of a round: its number, name, address, and what it runs.

    Attributes:
        identity: differs from launcher to launcher.
        beat: counts up while the machine waits.
    """

    machine: int
    host: str
    address: str
    machines: int
    processes: int
    restarts: int
    role: str
    identity: str
    beat: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"machine {self.machine} ({self.host}, {self.address})"


class MachineLost(RunError):
    """A machine does not answer any more."""


class Heartbeat(threading.Thread):
    """Publishes the state of this machine in a round once a second, and reads those of the others.

    It has a connection of its own. A request to a store behind a cut link does not return, so no other thread waits for this one.

    Attributes:
        round: the round that is open.
        failure: which processes of which machine failed first, as a line; None if none did.
        notice: which machine is gone, as a line; None if none is.
        has_reported: this machine has said that it is done, has failed or ends.
    """

    def __init__(self, rendezvous: Any) -> None:
        super().__init__(name="accelerate-heartbeat", daemon=True)
        self._members, self._machine = rendezvous.members, rendezvous.machine
        self._place, self._timeout = (rendezvous.host, rendezvous.port), rendezvous.heartbeat_timeout
        self._number = self.round = rendezvous.round
        self.failure: str | None = None
        self.notice: str | None = None
        self.has_reported = self._stopped = False
        self._wake = threading.Event()
        self._own: dict[str, Any] = {"beat": 0}
        self._posts: dict[str, str] = {}
        self._version = self._sent = 0
        now = time.monotonic()
        self._answered, self._broken = now, ""
        self._states: list[dict[str, Any]] = [{} for _ in self._members]
        self._changed = [now for _ in self._members]

    def publish(self, **state: bool) -> None:
        """Let the other machines know the state of this one."""
        self._own |= state
        self._version += 1
        self._wake.set()

    def report_done(self) -> None:
        """The processes of this machine are done."""
        self.has_reported = True
        self.publish(done=True)

    def report_failure(self, what: str) -> None:
        """Processes of this machine have failed; the first report of all machines counts."""
        self._post("failed", f"{self._members[self._machine]}: {what}")

    def report_end(self, what: str) -> None:
        """This launcher leaves the run, so that the others need not wait until it is missed."""
        self._post("lost", f"{self._members[self._machine]} {what}.")

    def _post(self, key: str, text: str) -> None:
        self.has_reported = True
        self._posts[f"{key}/{self._number}"] = text
        self.publish()

    def machines_that(self, word: str) -> set[int]:
        """Return the machines that have published `word`."""
        return {machine for machine, state in enumerate(list(self._states)) if state.get(word)}

    def all_done(self) -> bool:
        """Whether the processes of all machines are done."""
        return len(self.machines_that("done")) == len(self._members)

    def lost(self) -> MachineLost | None:
        """Return the error that names a machine which does not answer; None if all do."""
        if self.all_done():
            return None
        if self.notice is not None:
            return MachineLost(f"{self.notice} The processes of the other machines are ended.")
        silent = time.monotonic() - self._answered
        if not self._broken and silent <= self._timeout:
            return None
        closed = f"has closed the connection ({self._broken})"
        why = closed if self._broken else f"has not answered for {silent:.0f} s"
        host, port = self._place
        return MachineLost(
            f"{self._members[0]} {why} at {host}, port {port}: it is down, or one of the two machines is cut off. The processes of "
            f"this machine ({self._members[self._machine].host}) are ended."
        )

    def stop(self) -> None:
        """Publish what is left and end; this waits a moment at most, because the store may never answer."""
        deadline = time.monotonic() + 1.0
        while self._sent < self._version and self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._stopped = True
        self._wake.set()
        self.join(timeout=0.2)

    def run(self) -> None:
        """Exchange states with the store until the thread is stopped or the connection breaks."""
        try:
            limit = timedelta(seconds=max(self._timeout, 1.0))
            store = TCPStore(*self._place, is_master=False, timeout=limit, wait_for_workers=False)
            while not self._stopped:
                self._wake.clear()
                self._exchange(store)
                self._answered = time.monotonic()
                self._wake.wait(min(BEAT_S, self._timeout / 4))
        except Exception as error:
            self._broken = line_of(error)

    def _exchange(self, store: TCPStore) -> None:
        version = self._version
        for key, text in list(self._posts.items()):
            store.compare_set(key, "", text)
        self._own["beat"] += 1
        keys = [f"state/{self._number}/{machine}" for machine in range(len(self._members))]
        store.set(keys[self._machine], json.dumps(self._own))
        now = time.monotonic()
        states = [json.loads(text) for text in store.multi_get(keys)]
        for machine, state in enumerate(states):
            if state.get("beat") != self._states[machine].get("beat"):
                self._changed[machine] = now
            silent = now - self._changed[machine]
            if silent > self._timeout and not (state.get("done") or state.get("left")):
                why = f"has not answered for {silent:.0f} s: it is down, or its network is."
                store.compare_set(f"lost/{self._number}", "", f"{self._members[machine]} {why}")
        self._states = states
        self.failure = _value(store, f"failed/{self._number}")
        self.notice = _value(store, f"lost/{self._number}")
        self.round = int(store.get("round"))
        self._sent = version
        if (self.failure or self.notice or self.all_done()) and "heard" not in self._own:
            self.publish(heard=True)


def _value(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def line_of(error: BaseException) -> str:
    """Return an error of the store in one line; torch may add where in its code it happened."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
