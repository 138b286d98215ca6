"""`PartialState`: which process this is, which device it uses and how it talks to the others."""

import builtins
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from accelerate import comm
from accelerate.base.environment import parse_flag_from_env
from accelerate.base.nested import piece
from accelerate.config import env
from accelerate.config.enums import DistributedType, SageMakerDistributedType
from accelerate.config.strategies import engines, record_of, traits_of
from accelerate.devices.table import DEVICES, Device, detect, row
from accelerate.extension import all_specs, imported
from accelerate.runtime import failure, peers, rendezvous, storage, torch_private

logger = logging.getLogger(__name__)
failure.watch()


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Take any arguments and do nothing; it replaces a decorated function on the other processes."""


class SharedDict:
    """Shows a slot of `runtime.storage` as a class attribute: the current dictionary, or an instance's own one."""

    def __init__(self, slot: storage.Slot) -> None:
        self.slot = slot

    def __set_name__(self, owner: type, name: str) -> None:
        self.slot.shown_as(owner, name)

    def __get__(self, instance: Any, owner: type | None = None) -> dict[str, Any]:
        return self.slot.current if instance is None else instance.__dict__


class Processes:
    """Methods of an object that knows its process's position in the run, common to `Accelerator` and the states."""

    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int

    @property
    def use_distributed(self) -> bool:
        """Whether several processes cooperate."""
        return traits_of(self.distributed_type).distributed and self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0 of the run."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is rank 0 of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank of the run."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until every rank has made this call; a single process returns at once.

        Collective: call on every rank.

        Example:
            >>> from accelerate import Accelerator
            >>> Accelerator(cpu=True).wait_for_everyone()
        """
        comm.for_type(self.distributed_type).barrier()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each process its piece of the inputs; the first processes get one more if the division has a remainder.

        Args:
            inputs: a list, tuple, tensor (cut along its first dimension), `datasets.Dataset`, or a dictionary of such
                values of one length, also nested. Every process gets other values, such as a string, unchanged.
            apply_padding: repeat the last element until every piece is as long as the longest, so that results can be
                gathered; drop the surplus afterwards.

        Raises:
            ValueError: the values of a dictionary differ in length.

        Example:
            >>> from accelerate import PartialState
            >>> with PartialState().split_between_processes(["a", "b", "c"]) as words:
            ...     print(words)  # of two processes, the first prints ['a', 'b'], the second ['c']
            ['a', 'b', 'c']
        """
        yield piece(inputs, self.process_index, self.num_processes, apply_padding)

    @contextmanager
    def _goes_first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            # Also after an exception: the others must not wait for a process that has failed.
            if first:
                self.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that the main process goes through before the others enter.

        Collective: call on every rank.
        """
        return self._goes_first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that each machine's main process goes through before its others.

        Collective: call on every rank.
        """
        return self._goes_first(self.is_local_main_process)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine, on its main process.

        Args:
            *args: As for the built-in ``print``.
            **kwargs: As for the built-in ``print``.
        """
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function to run only on the main process; elsewhere it returns None.

        Args:
            function: The function, when used without parentheses.

        Example:
            >>> from accelerate import PartialState
            >>> @PartialState().on_main_process
            ... def report(): return "written"
            >>> report()
            'written'
        """
        return _only_on(self, function, self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function to run once per machine; elsewhere it returns None.

        Args:
            function: The function, when used without parentheses.
        """
        return _only_on(self, function, self.is_local_main_process)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function to run only on the last rank; elsewhere it returns None."""
        return _only_on(self, function, self.is_last_process)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function to run only on one rank (always, with one process); elsewhere it returns None.

        Args:
            function: The function, when used without parentheses.
            process_index: The rank.
        """
        return _only_on(self, function, self.process_index == process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function to run on one rank of each machine; elsewhere it returns None.

        Args:
            function: The function, when used without parentheses.
            local_process_index: The rank on its machine.
        """
        return _only_on(self, function, self.local_process_index == local_process_index)


class ProcessView(Processes):
    """The state of a process. A missing attribute raises an error that explains it, and the state can be printed."""

    _known_attrs: ClassVar[tuple[str, ...]] = (
        *("_cpu", "backend", "device", "debug", "distributed_type", "num_processes", "process_index"),
        *("local_process_index", "fork_launched"),
    )
    device: torch.device
    backend: str | None
    debug: bool

    def __getattr__(self, name: str) -> Any:
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in self._known_attrs:
            message += ": the state was never built. Build `Accelerator()` or `PartialState()` first."
        raise AttributeError(message)

    @property
    def initialized(self) -> bool:
        """Whether the state has been built."""
        return bool(self.__dict__)

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave a process group, by default all of them. Every rank of it must call this.

        Ranks can still be asked for afterwards; the next `Accelerator()`, or a `PartialState` with arguments or after a reset, starts
        again.
        """
        if dist.is_available() and dist.is_initialized():
            if group is None:
                comm.forget()
            rendezvous.wait_for_threads()
            dist.destroy_process_group(group)

    def __repr__(self) -> str:
        if not self.__dict__:
            return f"{type(self).__name__}(not built)"
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


class PartialState(ProcessView):
    """The process's position in the run: ranks, device, process group; enough for inference without an `Accelerator`.

    All instances share their attributes. The first one joins the process group, so every rank must build one; later ones
    cost nothing. After `_reset_state`, existing instances keep their attributes. The next instance adopts a live process group
    instead of joining a second one.

    Args:
        cpu: use the processor even if there is an accelerator. ACCELERATE_USE_CPU=1 does the same.
        kwargs: arguments of `torch.distributed.init_process_group`, such as `backend` and `timeout`; None means not
            given. `_use_sagemaker_dp=True` asks for SageMaker's data parallelism.

    Attributes:
        device: the `torch.device` of this process.
        distributed_type: how the processes cooperate.
        backend: name of the `torch.distributed` backend, or None.
        num_processes: how many processes there are.
        process_index: number of this process among all.
        local_process_index: number of this process on its machine.
        debug: whether collectives are checked first (ACCELERATE_DEBUG_MODE).
        fork_launched: whether a notebook started this process by forking (FORK_LAUNCHED).

    Raises:
        TypeError: an argument is none of `init_process_group`.
        ValueError: the environment contradicts itself, or a setting cannot take effect because a group exists.

    Example:
        >>> from accelerate import PartialState
        >>> PartialState().is_main_process
        True
    """

    __module__ = "accelerate.state"  # the path in pickles
    _shared_state: ClassVar[Any] = SharedDict(storage.process)

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = storage.process.current
        settings = _settings(kwargs)
        if self.__dict__:
            if not ((cpu or settings) and group_is_gone(self.__dict__)):
                _check_unchanged(self, settings)
                return
            self.__dict__ = storage.process.renew()
        try:
            self._start(cpu, settings)
        except BaseException:
            self.__dict__.clear()  # a half-built state would pass for a built one
            raise

    def _start(self, cpu: bool, settings: dict[str, Any]) -> None:
        env.refuse_removed_variables()
        env.refuse_missing_strategies()
        kind = os.environ.get("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE")
        asked = parse_flag_from_env("ACCELERATE_USE_SAGEMAKER") and kind == SageMakerDistributedType.DATA_PARALLEL
        sagemaker = settings.pop("_use_sagemaker_dp", asked)
        cpu = bool(cpu) or env.value_of("cpu")
        backend, distributed_type = self._prepare_backend(cpu, sagemaker, settings.pop("backend", None))
        abilities = traits_of(distributed_type)
        ranks = rendezvous.ALONE
        hardware = device_for(cpu, backend) if abilities.distributed else detect(cpu)
        if abilities.distributed and not abilities.torch_distributed:
            rank, size, local_rank = hardware.ranks()
            ranks = rendezvous.Ranks(rank, size, local_rank, None, hardware.type)
        elif abilities.distributed:
            ranks = _join(backend, hardware, settings)
            peers.joined(torch_private.default_store(), ranks.rank, ranks.world_size)
            if joins := record_of(distributed_type).joins:
                imported(joins)(backend, hardware.type, ranks.local_rank or 0)
        self._cpu = cpu
        self.backend = backend
        self.device = _place(hardware, ranks.local_rank, abilities.distributed)
        self.debug = bool(env.value_of("debug"))
        self.distributed_type = distributed_type
        self.num_processes = ranks.world_size
        self.process_index = ranks.rank
        self.local_process_index = ranks.local_rank
        self.fork_launched = parse_flag_from_env("FORK_LAUNCHED")
        for spec in all_specs():
            for option, function in spec.started.items():
                if env.value_of(option):
                    imported(function)(self)

    def _prepare_backend(
        self, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, DistributedType]:
        """Return the backend (None without a group) and the distributed type; downstream libraries replace this method."""
        if sagemaker_dp:
            importlib.import_module("smdistributed.dataparallel.torch.torch_smddp")
            return "smddp", DistributedType.MULTI_GPU
        engine = next(
            (spec for spec in engines().values() if spec.traits.needs_group and env.value_of(spec.switch)), None
        )
        if dist.is_available() and dist.is_initialized():
            size = dist.get_world_size()
            hardware = device_for(cpu, None)
            backend = _adopted_backend(hardware, cpu, backend)
        else:
            hardware = detect(cpu)
            if hardware.type == "xla":
                return "xla", hardware.distributed_type
            ranks = rendezvous.resolve()
            size = 0 if ranks is None else ranks.world_size
            hardware = device_for(cpu, backend if size > 1 else None)
        # One process that a launcher started on an accelerator still gets a group, as torchrun scripts expect.
        if engine is None and (size == 0 or (size == 1 and hardware.type in ("cpu", "mps"))):
            return None, DistributedType.NO
        kind = hardware.distributed_type if engine is None else engine.kinds[0]
        return backend or hardware.backend(), kind

    @staticmethod
    def _reset_state() -> None:
        """Let the next instance be built again; existing instances keep their attributes."""
        storage.process.renew()

    @property
    def default_device(self) -> torch.device:
        """The device that this machine offers, without an index, whatever the state was asked to use."""
        return torch.device(detect().type)

    def set_device(self) -> None:
        """Make the state's device the current one of this process; where it is None, choose it again.

        Not a collective.
        """
        if self.device is None:
            distributed = traits_of(self.distributed_type).distributed
            hardware = device_for(self._cpu, self.backend) if distributed else detect(self._cpu)
            self.device = _place(hardware, self.local_process_index, distributed)
        row(self.device.type).set(self.device.index or 0)


def _only_on(state: Processes, function: Callable[..., Any] | None, chosen: bool) -> Callable[..., Any]:
    """Return the function on the chosen process or on a single one; without a function return a decorator."""
    if function is None:
        return partial(_only_on, state, chosen=chosen)
    return function if chosen or not state.use_distributed else do_nothing


def _settings(kwargs: dict[str, Any]) -> dict[str, Any]:
    settings = {name: value for name, value in kwargs.items() if value is not None}
    if settings and dist.is_available():
        accepted = {"_use_sagemaker_dp", *inspect.signature(dist.init_process_group).parameters}
        unknown = settings.keys() - accepted
        if unknown:
            raise TypeError(
                f"PartialState does not know {', '.join(sorted(unknown))}; it takes `cpu` and the arguments of "
                f"torch.distributed.init_process_group: {', '.join(sorted(accepted))}."
            )
    if isinstance(settings.get("timeout"), (int, float)):
        settings["timeout"] = timedelta(seconds=settings["timeout"])
    return settings


def group_is_gone(values: dict[str, Any]) -> bool:
    """Return whether a state's dictionary speaks of a process group that was destroyed since."""
    had_one = values.get("num_processes", 1) > 1 and traits_of(values["distributed_type"]).torch_distributed
    return had_one and not dist.is_initialized()


def _cannot_change(name: str, value: Any, live: Any) -> ValueError:
    return ValueError(
        f"{name}={value!r} cannot take effect: a process group with {name}={live!r} exists already. Give the setting where "
        "the first `Accelerator()` or `PartialState()` is built, or call `destroy_process_group()` before."
    )


def _check_unchanged(state: ProcessView, settings: dict[str, Any]) -> None:
    if not settings.keys() & {"backend", "timeout"} or not state.use_distributed:
        return
    if settings.get("backend", state.backend) != state.backend:
        raise _cannot_change("backend", settings["backend"], state.backend)
    if "timeout" in settings and dist.is_available() and dist.is_initialized():
        live = torch_private.live_timeout()
        if live not in (None, settings["timeout"]):
            raise _cannot_change("timeout", settings["timeout"], live)


def _live_backends() -> dict[str, str]:
    """Return the backend of the live process group for each kind of device."""
    return dict(pair.split(":", 1) for pair in str(dist.get_backend_config()).split(",") if ":" in pair)


def device_for(cpu: bool, backend: str | None) -> Device:
    """Return the kind of device that several processes use; a live process group determines it."""
    hardware = detect(cpu)
    if dist.is_available() and dist.is_initialized():
        live = _live_backends()
        if cpu or hardware.type in live:
            return hardware
        return row(next((kind for kind in live if kind in DEVICES and DEVICES[kind].available()), "cpu"))
    if not hardware.backends:
        logger.warning("torch has no collectives on %s: several processes use the processor instead.", hardware.type)
        return row("cpu")
    return hardware


def _adopted_backend(hardware: Device, cpu: bool, backend: str | None) -> str:
    live = _live_backends()
    live_backend = live.get(hardware.type) or dist.get_backend()
    if backend not in (None, live_backend) and backend != dist.get_backend():
        raise _cannot_change("backend", backend, live_backend)
    if cpu and live and hardware.type not in live:
        raise _cannot_change("cpu", cpu, False)
    return live_backend


def _join(backend: str | None, hardware: Device, settings: dict[str, Any]) -> rendezvous.Ranks:
    """Join the others, or adopt the group that is alive. Every rank comes here."""
    if dist.is_initialized():
        timeout = settings.get("timeout")
        live = torch_private.live_timeout()
        if timeout is not None and live not in (None, timeout) and not torch_private.set_live_timeout(timeout):
            raise _cannot_change("timeout", timeout, live)
        return rendezvous.live_ranks()
    ranks = rendezvous.resolve() or rendezvous.ALONE
    if backend is None:
        return ranks
    if hardware.type == "cpu" and "OMP_NUM_THREADS" not in os.environ and (ranks.local_world_size or 1) > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks.local_world_size))
    crowded = hardware.type != "cpu" and (ranks.local_world_size or 1) > max(hardware.count(), 1)
    waiting = partial(peers.joining, ranks.rank, ranks.world_size)
    rendezvous.init_process_group(ranks, backend, waiting, **settings)
    if crowded and backend != "gloo":
        rendezvous.check_devices_are_distinct(ranks, hardware.torch_device(ranks.local_rank), backend)
    return ranks


def _place(hardware: Device, local_rank: int, distributed: bool) -> torch.device:
    """Choose this process's device and make it current."""
    device_name = os.environ.get("ACCELERATE_TORCH_DEVICE", "").strip()
    if device_name and hardware.type == row(device_name).type:
        device = torch.device(device_name)
    elif distributed:
        device = hardware.torch_device(local_rank)
    else:
        # Without an index a lone process follows torch's own choice, which `torch.cuda.device(...)` may change.
        return torch.device(hardware.type) if hardware.type != "xla" else hardware.current()
    if device.index is not None and hardware.type not in ("cpu", "mps"):
        hardware.set(device.index)
    return device
