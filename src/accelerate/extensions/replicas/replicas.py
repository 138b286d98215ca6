"""Replica groups that train together through torchft, and continue without one that fails.

A step begins with its first batch: the groups that are alive form a quorum, and a group that has returned
takes over the state of a peer. Each backward pass that synchronises gradients then averages them over the groups, before they are clipped.
The step of the optimizer asks torchft whether the averages arrived. If not, no group's weights change, and the batches are read again.
"""

import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from accelerate.base._warn import warn_user
from accelerate.extension import Extension
from accelerate.extensions.replicas.data import Position, Share, check_loader, open_share, order_of
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.runtime import torch_private
from accelerate.runtime.torch_private import local_part

# Gradients are averaged in pieces of about this many bytes, of which so many are on their way at once.
_PIECE, _IN_FLIGHT = 64 * 2**20, 4
_FILE = "replicas.json"


class Replicas(Extension):
    """The replica groups of a run: who takes part in the step that is open, and how far the groups are.

    Attributes:
        rank: The rank of this group among those of the step; 0 before the first one.
        count: How many groups take part in the step.
        step: How many steps the groups have committed.
        position: The epoch, and its batches that committed steps have used.
        failures: How many steps of this process were not committed; their batches were read again.
    """

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.settings = run.fault_tolerance_handler
        self.rank, self.count, self.step, self.failures = 0, 0, 0, 0
        self.position = Position()
        self._manager: Any = None
        self._store: Any = None
        # Of the open step: whether a quorum was formed, its micro-batches, whether gradients were averaged, whether it is committed.
        self._is_open, self._rounds, self._is_averaged = False, 0, False
        self._is_committed: bool | None = None
        self._share: Share | None = None
        # An epoch and a digest of its order, here and in the peer whose state was taken over.
        self._order, self._peer_order = (-1, ""), (-1, "")
        self._finished_epoch = -1
        self._is_reading = False
        # Of the backward pass that runs: the error that was handled before it, and the hook on its loss.
        self._error_before: BaseException | None = None
        self._weighing: RemovableHandle | None = None

    @classmethod
    def attach(cls, run: Any) -> "Replicas":
        """Return the extension of a run with `FaultToleranceKwargs`; ImportError without torchft, ValueError for what it excludes.

        Collective: call on every rank.
        """
        settings, layout, strategy = run.fault_tolerance_handler, run.parallelism_config, run._strategy.name
        if find_spec("torchft") is None:
            raise ImportError("FaultToleranceKwargs needs torchft, which is not installed. Run `pip install torchft`.")
        settings.address()
        if strategy not in ("single", "ddp", "fsdp2"):
            raise ValueError(
                f"FaultToleranceKwargs was given with the strategy {strategy!r}. Use DDP, FSDP2 or one process per replica group."
            )
        for name in ("tp", "cp", "sp", "pp"):
            if layout is not None and getattr(layout, f"{name}_size") > 1:
                raise ValueError(
                    f"FaultToleranceKwargs was given with {name}_size={getattr(layout, f'{name}_size')}. Use data parallelism or FSDP2 in "
                    "each replica group."
                )
        if run.fp8_enabled:
            raise ValueError("FaultToleranceKwargs was given with mixed_precision='fp8'. Use 'bf16', 'fp16' or 'no'.")
        if not run.gradient_state.sync_with_dataloader:
            raise ValueError(
                "FaultToleranceKwargs was given with sync_with_dataloader=False, and a step of the groups cannot extend over two epochs. "
                "Omit sync_with_dataloader."
            )
        return cls(run)

    def registered(self, kind: str, prepared: Any, evaluation: bool) -> None:
        """Let a prepared optimizer step only if the step is committed.

        Collective: call on every rank.
        """
        if kind == "optimizer":
            if prepared._steps_in_backward:
                raise NotImplementedError(
                    f"{type(prepared.optimizer).__name__} steps in its backward pass, before gradients are averaged over replica groups. Use "
                    "another optimizer."
                )
            prepared.__class__, prepared._replicas = ReplicaOptimizer, self

    # The data.

    def batches(self, loader: Any, epoch: int) -> Iterator[Any]:
        """Yield this group's batches of an epoch; see `replica_batches`.

        Collective: call on every rank.
        """
        check_loader(loader)
        if self._is_reading:
            raise RuntimeError(
                "replica_batches() was called inside the loop of another replica_batches(). Use one loop at a time."
            )
        if epoch <= self._finished_epoch:
            raise ValueError(
                f"replica_batches() got epoch={epoch}, which this process has finished. Pass the number of the running epoch."
            )
        seed, length = self.settings.data_seed, len(loader)
        self._order = (epoch, order_of(loader, epoch, seed))
        reader: Any = None
        self._is_reading = True
        try:
            while length and self.position.epoch <= epoch:
                self._begin_step()
                if self.position.epoch > epoch:
                    break  # the groups are in a later epoch, whose loop uses the quorum
                if self._peer_order[0] == epoch and tuple(self._peer_order) != self._order:
                    raise ValueError(
                        f"The order of the samples in epoch {epoch} differs from that of a peer, so samples would be used twice. Pass the "
                        "same dataset, batch size, seeds and data_seed in all replica groups."
                    )
                if self.position.epoch < epoch:
                    self.position = Position(epoch)
                share = Share(self.position.batches, self.rank, self.count, length)
                if reader is None or self._share is None or not self._continues(share, self._share):
                    if reader is not None:
                        reader.close()
                    reader, self._rounds = open_share(loader, share, epoch, seed), 0
                    self._share = share
                yield from self._micro_batches(reader)
        finally:
            self._is_reading = False
            if reader is not None:
                reader.close()
        self._finished_epoch = epoch

    @property
    def weight(self) -> float:
        """The weight of the micro-batch read last in the mean over the groups: 0 for a batch that this group repeats."""
        return 1.0 if self._share is None else self._share.weight(self._rounds - 1)

    def _continues(self, share: Share, last: Share) -> bool:
        """Whether the reader of the last share yields the batches of this one next."""
        same_groups = (last.rank, last.count) == (share.rank, share.count)
        return same_groups and last.used_after(self._rounds) == share.first

    def _micro_batches(self, reader: Iterator[Any]) -> Iterator[Any]:
        while self._is_committed is None:
            batch = next(reader, None)
            if batch is None:
                raise RuntimeError(
                    "The epoch of replica_batches() ended, and no prepared optimizer has stepped since the last batch. Call "
                    "optimizer.step() in the loop, in every accumulation step."
                )
            self._rounds += 1
            yield batch

    # The quorum.

    def _begin_step(self) -> None:
        """Form a quorum with the groups that are alive, unless one is open; take over the state of a peer if this group is behind."""
        if self._is_open and self._is_committed is None:
            return
        if self._manager is None:
            self._connect()
        manager, settings = self._manager, self.settings
        deadline = time.monotonic() + settings.quorum_timeout_s
        while True:
            try:
                manager.start_quorum()
            except ValueError:  # of `restore`
                raise
            except Exception as error:
                raise RuntimeError(
                    self._unreachable(f"quorum_timeout_s={settings.quorum_timeout_s}", error)
                ) from error
            self.rank, self.count = manager.participating_rank() or 0, manager.num_participants()
            if self.count >= settings.min_replicas:
                break
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.count} replica groups are alive after quorum_timeout_s={settings.quorum_timeout_s}, fewer than "
                    f"min_replicas={settings.min_replicas}. Start more groups, or pass a smaller number."
                )
            time.sleep(0.1)
        self.step = manager.current_step()
        self._is_open, self._is_averaged, self._is_committed = True, False, None
        if self.step == 0 and self.count > 1:
            self._take_over_first_weights()

    @torch.no_grad()
    def _take_over_first_weights(self) -> None:
        """Give all groups the weights of the first one, bit for bit, before their first step.

        torchft could do so itself. But it spreads the load: the ranks of one group would take over the weights of different groups.
        """
        from accelerate.extensions.replicas import state as peer_state

        for part in peer_state.weights(self.run):
            data = part.contiguous().reshape(-1).view(torch.uint8).clone()
            if self.rank > 0:
                data.zero_()  # a sum with zeros is exact
            self._manager.allreduce(data, reduce_op=dist.ReduceOp.SUM).wait()
            # After an error the step is not committed, and the weights are sent again.
            if self.rank > 0 and self._manager.errored() is None:
                part.copy_(data.view(part.dtype).view(part.shape))

    def _unreachable(self, limit: str, error: Exception) -> str:
        return (
            f"No quorum of replica groups was formed at the lighthouse {self.settings.address()} within {limit}: {error}. Start the "
            "lighthouse and the other groups, or pass a longer time."
        )

    def _connect(self) -> None:
        """Join the other groups: start the manager, whose first rank tells the lighthouse that the group is alive."""
        from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

        from accelerate.extensions.replicas import state as peer_state

        run, settings = self.run, self.settings
        peer_state.check(peer_state.capture(run))
        place: list[Any] = [None]
        if run.process_index == 0:
            self._store = dist.TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
            place = [(socket.gethostname(), self._store.port)]
        ((host, port),) = run._communicator.broadcast_object_list(place)
        backend = settings.backend or ("nccl" if run.device.type == "cuda" else "gloo")
        timeout = timedelta(seconds=settings.timeout_s)
        try:
            self._manager = Manager(
                pg=(ProcessGroupGloo if backend == "gloo" else ProcessGroupNCCL)(timeout=timeout),
                load_state_dict=self._restore,
                state_dict=self._capture,
                min_replica_size=settings.min_replicas,
                use_async_quorum=False,  # which batches are read depends on the quorum
                init_sync=False,  # see `_take_over_first_weights`
                timeout=timeout,
                quorum_timeout=timedelta(seconds=settings.quorum_timeout_s),
                connect_timeout=timeout,
                rank=run.process_index,
                world_size=run.num_processes,
                store_addr=host,
                store_port=port,
                lighthouse_addr=settings.address(),
                replica_id=settings.replica_id,
                checkpoint_transport=peer_state.PlainTransport(timeout=timeout, num_chunks=0),
            )
        except Exception as error:
            raise RuntimeError(self._unreachable(f"timeout_s={settings.timeout_s}", error)) from error
        if self.step:  # that of a checkpoint
            self._manager.load_state_dict({"step": self.step, "batches_committed": 0})

    def _capture(self) -> dict[str, Any]:
        from accelerate.extensions.replicas import state as peer_state

        return {**peer_state.capture(self.run), "position": self.position.plain(), "order": self._order}

    def _restore(self, state: dict[str, Any]) -> None:
        from accelerate.extensions.replicas import state as peer_state

        peer_state.restore(self.run, state)
        self.position, self._peer_order = Position(**state["position"]), state["order"]

    # The gradients.

    def phase_begins(self, phase: str, loss: Any) -> None:
        """Weigh the loss of a micro-batch that some groups repeat.

        Not a collective.
        """
        if phase != "backward":
            return
        self._error_before = sys.exc_info()[1]
        if not self._is_open or self._is_committed is not None:
            raise RuntimeError(
                "accelerator.backward() was called outside of a step of the replica groups. Read the batches with "
                "accelerator.replica_batches(loader, epoch), and step the optimizers after the last backward pass."
            )
        weight = self.weight
        if weight != 1.0 and isinstance(loss, torch.Tensor) and loss.requires_grad:
            self._weighing = loss.register_hook(lambda gradient: gradient * weight)

    def phase_ends(self, phase: str) -> None:
        """Average the gradients over the groups after a backward pass that has synchronised them within the group.

        Collective: call on every rank.
        """
        failed = sys.exc_info()[1] is not self._error_before
        if self._weighing is not None:
            self._weighing.remove()
            self._weighing = None
        if phase == "backward" and self.run.sync_gradients and not failed:
            if self.count > 1:
                self._average()
            self._is_averaged = True

    @torch.no_grad()
    def _average(self) -> None:
        owners, parts = {}, []
        trained = {id(p): p for model in self.run._models for p in model.parameters() if p.requires_grad}
        for parameter in trained.values():
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                raise NotImplementedError(
                    "Sparse gradients cannot be averaged over replica groups. Use sparse=False in embeddings."
                )
            part = torch.zeros_like(local_part(parameter)) if gradient is None else local_part(gradient)
            owners[id(part)] = parameter
            parts.append(part)
        in_flight: deque[Any] = deque()
        for piece in torch_private.take_tensors(parts, _PIECE):  # of one dtype and kind of device each
            parameters = [owners[id(part)] for part in piece]
            # A parameter without a gradient in all groups keeps none, as in one group.
            present = piece[0].new_tensor([parameter.grad is not None for parameter in parameters])
            flat = torch_private.flatten_dense_tensors([*piece, present])
            in_flight.append((self._manager.allreduce(flat), flat, [*piece, present], parameters))
            if len(in_flight) == _IN_FLIGHT:
                self._receive(*in_flight.popleft())
        for averaging in in_flight:
            self._receive(*averaging)

    def _receive(self, work: Any, flat: torch.Tensor, parts: list[torch.Tensor], parameters: list[Any]) -> None:
        work.wait()
        *means, present = torch_private.unflatten_dense_tensors(flat, parts)
        missing = any(parameter.grad is None for parameter in parameters)
        shares = present.tolist() if missing else [1.0] * len(parameters)
        for parameter, mean, share in zip(parameters, means, shares, strict=True):
            if parameter.grad is None and share > 0:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                local_part(parameter.grad).copy_(mean)

    def commits(self) -> bool:
        """Return whether the open step is committed: all its averages arrived on every rank of the group.

        Collective: call on every rank.
        """
        if self._is_committed is not None:
            return self._is_committed
        if not self._is_averaged:
            raise RuntimeError(
                "optimizer.step() was called, and no gradients were averaged over the replica groups since the last step. Read batches "
                "with accelerator.replica_batches(loader, epoch), and call accelerator.backward(loss)."
            )
        if any(getattr(model, "require_backward_grad_sync", True) is False for model in self.run._models):
            raise RuntimeError(
                "optimizer.step() was called inside LocalSGD or no_sync, where the ranks of a replica group have different gradients. Leave "
                "the context before the step, or omit FaultToleranceKwargs."
            )
        self._is_committed = self._manager.should_commit()
        if not self._is_committed:
            self.failures += 1
            warn_user(
                "A step of the replica groups was not committed, since a group was lost in it. Its batches are read again."
            )
        elif self._share is not None:
            used = self._share.used_after(self._rounds)
            epoch, ends = self.position.epoch, used == self._share.length
            self.position = Position(epoch + 1) if ends else Position(epoch, used)
        self.step = self._manager.current_step()
        return self._is_committed

    # Checkpoints and the end.

    def saving(self, plan: Any) -> None:
        """Save how far the groups are.

        Not a collective.
        """
        if plan.writes_shared:
            plan.add_bytes(_FILE, json.dumps({"step": self.step, **self.position.plain()}).encode())

    def loading(self, folder: str) -> None:
        """Load how far the groups were; RuntimeError once they train, ValueError for a checkpoint of a run without groups.

        Not a collective.
        """
        if self._manager is not None:
            raise RuntimeError(
                "load_state() was called while the replica groups train. Call it before replica_batches()."
            )
        path = os.path.join(folder, _FILE)
        if not os.path.exists(path):
            raise ValueError(
                f"The checkpoint {folder!r} has no {_FILE}, since a run without FaultToleranceKwargs saved it, so the position of the replica "
                "groups in the data is not known. Load it without FaultToleranceKwargs, and start the groups from its weights (save_model)."
            )
        with open(path, "rb") as file:
            saved = json.load(file)
        self.step, self.position = saved["step"], Position(saved["epoch"], saved["batches"])

    def released(self) -> None:
        """Leave the groups.

        Collective: call on every rank.
        """
        if self._manager is not None:
            self._manager.shutdown()
        self._manager, self._store, self._is_open = None, None, False

    def ended(self) -> None:
        """Leave the groups.

        Collective: call on every rank.
        """
        self.released()


class ReplicaOptimizer(AcceleratedOptimizer):
    """A prepared optimizer that does not step, and whose schedules do not advance, if the step of the groups is not committed."""

    _replicas: Replicas | None = None  # None in a copy of another process
    _is_refused = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as that of AcceleratedOptimizer
        """Update the parameters if the step of the replica groups is committed, unless gradients are still accumulating.

        Collective: call on every rank.
        """
        groups = self._replicas
        self._is_refused = groups is not None and self.gradient_state.sync_gradients and not groups.commits()
        if not self._is_refused:
            super().step(closure)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was omitted: it was not committed, or the scaled gradients overflowed."""
        return self._is_refused or super().step_was_skipped

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_replicas"}


def replicas(accelerator: Any) -> Replicas | None:
    """The replica groups of a run with ``FaultToleranceKwargs``, or None."""
    return next(iter(accelerator.extensions.of_kind(Replicas)), None)


def replica_batches(accelerator: Any, loader: Any, epoch: int) -> Iterator[Any]:
    """Yield the batches of an epoch that this replica group reads, where the groups that are alive share them.

    Each batch of the epoch is used by one group in one committed step. Batches of a step that is not committed are read again. An epoch
    that the groups have finished yields nothing, so a restarted script runs its loops from the start.

    Collective: call on every rank.

    Args:
        loader: A prepared loader of a map-style dataset.
        epoch: The number of the epoch, from 0.

    Returns:
        An iterator over batches, on the device.

    Raises:
        ValueError: The loader cannot be read by position, the epoch is finished, or the groups differ.
        RuntimeError: The run has no ``FaultToleranceKwargs``, no quorum was formed, or no optimizer stepped.

    Example:
        >>> for epoch in range(3):  # doctest: +SKIP
        ...     for batch in accelerator.replica_batches(loader, epoch):
        ...         accelerator.backward(model(batch).mean())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    extension = replicas(accelerator)
    if extension is None:
        raise RuntimeError(
            "replica_batches() was called, and the run has no replica groups. Pass Accelerator(kwargs_handlers=[FaultToleranceKwargs()])."
        )
    return extension.batches(loader, epoch)
