"""Sequences that ranks share through DeepSpeed (ALST): attention that swaps heads for tokens, and loaders that hand out parts.

Source: Arctic Long Sequence Training (arXiv 2506.13996), https://www.deepspeed.ai/tutorials/ulysses-alst-sequence-parallelism/
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed, nn

from accelerate.data.loader import PreparedLoader
from accelerate.runtime.run import Run

# Modules of a model whose sequences are shared have it, with what belongs to their engine.
_MARK = "_sequence_shared_by"


# -- attention -------------------------------------------------------------------------------------------------------


def share(accelerator: Run, model: nn.Module, micro_batch: int) -> Any:
    """Let the attention of a transformers model work on shared sequences; return the groups for `deepspeed.initialize`.

    Collective: call on every rank.

    Raises:
        ValueError: this model, its attention, its heads or the common length cannot be shared.
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    layout: Any = accelerator.parallelism_config  # with a size and a handler, as sequences are shared
    size, handler = layout.sp_size, layout.sp_handler
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if name is None:
        raise ValueError(
            f"sp_size={size} with sp_backend='deepspeed' shares the attention of transformers' models, and got a {type(model).__name__}. "
            "Pass such a model, or set sp_size=1."
        )
    if name == "eager":
        raise ValueError(
            f"{type(model).__name__} has attn_implementation='eager', which builds its mask from a full sequence. Load it with "
            "attn_implementation='sdpa' or a flash attention."
        )
    length = None if handler.sp_seq_length_is_variable else handler.sp_seq_length
    if length is not None and length % size:
        raise ValueError(
            f"sp_seq_length={length} cannot be cut into sp_size={size} equal parts. Set a multiple of {size}."
        )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = handler.sp_attn_implementation or name
    # A second engine would wrap the attention of the first, and DeepSpeed makes its groups once.
    before = getattr(ALL_ATTENTION_FUNCTIONS.get(name), _MARK, None)
    if before is not None:
        ALL_ATTENTION_FUNCTIONS[name] = before
    parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
    try:
        groups = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=name,
            sequence_parallel_size=size,
            micro_batch_size=micro_batch,
            seq_length=length,
            seq_length_is_variable=length is None,
        )
    except AttributeError as error:
        raise ValueError(
            f"DeepSpeed cannot share the attention of {type(model).__name__} (sp_size={size}): {error}. Take a decoder such as Llama."
        ) from error
    ulysses = ALL_ATTENTION_FUNCTIONS[name]
    core = inspect.getclosurevars(ulysses).nonlocals["uattn"]
    shared = _any_batch(ulysses, core, accelerator.gradient_state)
    for module in model.modules():
        setattr(module, _MARK, shared)
    ALL_ATTENTION_FUNCTIONS[name] = _by_model(core.attn)
    return groups


def average(engine: Any) -> None:
    """Let an engine average gradients over all ranks, which at stages 0 to 2 it would add up over those of one sequence."""
    # The stages differ: the reduce-scatter of stage 3 always averages. An average belongs to losses of full sequences from a
    # differentiable `all_gather`, because its backward pass adds up.
    for part in (engine, engine.optimizer):
        if hasattr(part, "sequence_parallel_size"):
            part.sequence_parallel_size = 1


def release(model: nn.Module) -> None:
    """Let a model's attention work on unsharded sequences again."""
    for module in model.modules():
        vars(module).pop(_MARK, None)


def _by_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return attention that is shared in the models marked so, and the original in all others: the name belongs to the process."""

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(module, _MARK, original)(module, *args, **kwargs)

    setattr(attend, _MARK, original)
    return attend


def _any_batch(ulysses: Callable[..., Any], core: Any, state: Any) -> Callable[..., Any]:
    """Return DeepSpeed's attention for batches of any size, and the original while a model evaluates unsharded batches."""

    def attend(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        active = state.active_dataloader
        if active is None or active._progress.micro_batches == 1:
            if not module.training:
                return core.attn(module, query, *args, **kwargs)
            if active is not None:
                raise ValueError(
                    "The model trains on batches of a loader that does not cut sequences into parts, and its ranks would take them for parts. "
                    "Pass the loader to prepare() together with the model, or to accelerator.deepspeed_ulysses_dl_adapter(loader, model)."
                )
        size = query.shape[0]
        if size != core.batch_size:
            core.batch_size = size
            for name in ("required_query_shape", "required_key_value_shape", "required_context_shape"):
                length, _, *rest = getattr(core, name)
                setattr(core, name, torch.Size((length, size, *rest)))
        return ulysses(module, query, *args, **kwargs)

    return attend


# -- loaders ---------------------------------------------------------------------------------------------------------


class UlyssesSPDataLoaderAdapter:
    """Hands out this rank's parts of the batches of all ranks that share sequences, one batch after the other.

    Each of `sp_world_size` ranks reads its own batches. As many steps work on them, all ranks together on one batch at a time.
    A batch is a dict with "input_ids" and "position_ids"; "labels" become "shift_labels", each at the position that predicts
    it. Tensors are split along dimension 1, other values go to all ranks. Only the last part of the last batch has the
    loader's end.

    Args:
        dl: A prepared loader.
        sp_rank: This rank's position among those that share sequences.
        sp_group: Their process group.
        sp_world_size: Their number.
        device: The device of the parts.
        length: The length of every sequence; None if it varies.
        skip: Parts to skip at the beginning.

    Raises:
        ValueError: While it is iterated, on all ranks: a batch cannot be cut, or some ranks have no batch left.
    """

    def __init__(
        self,
        dl: PreparedLoader,
        sp_rank: int,
        sp_group: Any,
        sp_world_size: int,
        device: torch.device,
        length: int | None = None,
        skip: int = 0,
    ) -> None:
        self.dl, self.sp_rank, self.sp_group, self.sp_world_size = dl, sp_rank, sp_group, sp_world_size
        self.device, self.length, self.skip = device, length, skip
        self._layout: Any = None
        self._heads: list[Any] = []

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size - self.skip

    def __iter__(self) -> Iterator[dict[str, Any]]:
        loader, progress, size, skip = self.dl, self.dl._progress, self.sp_world_size, self.skip
        pending, progress.micro_batches, progress.micro_batch = progress.pending, size, 0
        progress.micro_batch_loops = loop = progress.micro_batch_loops + 1
        alone = (
            pending is not None
            and progress.pending_in_epoch
            and pending.resume_without_skip
            and loader._origin is None
        )
        batches: Any = iter(loader)  # a generator
        try:
            while (parts := self._exchanged(next(batches, None))) is not None:
                ended, number = loader.end_of_dataloader, progress.batches
                if (
                    alone
                    and pending is not None
                    and number == pending.batches + 1
                    and pending.record.get("parts") == size
                ):
                    skip = pending.record["part"]  # a checkpoint was saved between the parts of this batch
                for part in range(skip, size):
                    last = part == size - 1
                    # A batch is behind once all of its parts are.
                    progress.micro_batch, progress.batches = (0, number) if last else (part + 1, number - 1)
                    progress.at_end = loader.end_of_dataloader = ended and last
                    loader.gradient_state._activate(loader)
                    yield parts[part]
                skip, alone = 0, False
        finally:
            batches.close()
            if progress.micro_batch_loops == loop:  # else it was left, and is collected while another one runs
                progress.micro_batches, progress.micro_batch = 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration draws."""
        self.dl.set_epoch(epoch)

    def _skipping_parts(self, number: int) -> "UlyssesSPDataLoaderAdapter":
        """A view that skips the first parts, for `skip_first_batches`."""
        batches, skip = divmod(number + self.skip, self.sp_world_size)
        loader: Any = self.dl._skipping(batches) if batches else self.dl
        shared = (self.sp_rank, self.sp_group, self.sp_world_size, self.device, self.length)
        return type(self)(loader, *shared, skip)

    def _exchanged(self, batch: Any) -> list[dict[str, Any]] | None:
        """Give each rank its part of this rank's batch, and return this rank's parts of all; None at the end.

        Collective: call on every rank.
        """
        problem, header = None, None
        sent: list[torch.Tensor] = []
        if batch is not None:
            try:
                header, sent = self._cut(batch)
            except ValueError as error:
                problem = str(error)
        heads = self._headers(problem, header)
        for rank, (problem, _) in enumerate(heads):
            if problem is not None:
                raise ValueError(f"The batch of rank {rank} cannot be shared. {problem}")
        over = [rank for rank, (_, header) in enumerate(heads) if header is None]
        if over and len(over) < len(heads):
            raise ValueError(
                f"Ranks {over} have no batch left, and the others share the next. Prepare the loader with even_batches=True or "
                "drop_last=True, so that all read as many."
            )
        if over:
            return None
        layouts = [heads[rank][1] for rank in distributed.get_process_group_ranks(self.sp_group)]
        sizes = [sum(_bytes(item) for item, cut in layout.values() if cut) for layout in layouts]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        distributed.all_to_all_single(
            received, torch.cat(sent), sizes, [part.numel() for part in sent], group=self.sp_group
        )
        return [_unpacked(layout, part) for layout, part in zip(layouts, received.split(sizes), strict=True)]

    def _headers(self, problem: str | None, header: Mapping[str, tuple[Any, bool]] | None) -> list[Any]:
        """Return each rank's description of its batch; objects are exchanged only if descriptions have changed.

        Collective: call on every rank.
        """
        before = self._layout
        self._layout = header if header is not None and all(cut for _, cut in header.values()) else None
        same = self._layout is not None and self._layout == before
        unchanged = torch.tensor(int(same), device=self.device)
        distributed.all_reduce(unchanged, distributed.ReduceOp.MIN)
        if not unchanged:
            self._heads = [None] * distributed.get_world_size()
            distributed.all_gather_object(self._heads, (problem, header))
        return self._heads

    def _cut(self, batch: Any) -> tuple[dict[str, tuple[Any, bool]], list[torch.Tensor]]:
        """Return a description of this rank's batch, and the bytes of each part; ValueError if it cannot be split."""
        missing = [
            name for name in ("input_ids", "position_ids") if not isinstance(batch, Mapping) or name not in batch
        ]
        if missing:
            raise ValueError(
                f"It is a {type(batch).__name__} without {missing}. Let the collate_fn return a dict with input_ids, labels and "
                "position_ids: torch.arange(length) for each sequence, starting again where a packed document does."
            )
        length, size = batch["input_ids"].shape[1], self.sp_world_size
        if length % size or self.length not in (None, length):
            expected = f"sp_seq_length={self.length}" if self.length else f"a multiple of sp_size={size}"
            raise ValueError(f"Its sequences have {length} tokens instead of {expected}. Pad or cut them.")
        header: dict[str, tuple[Any, bool]] = {}
        sent: list[list[torch.Tensor]] = [[] for _ in range(size)]
        for name, value in batch.items():
            if name == "labels" and torch.is_tensor(value):
                name, value = "shift_labels", nn.functional.pad(value[:, 1:], (0, 1), value=-100)
            if not torch.is_tensor(value):
                header[name] = (value, False)
                continue
            if value.dim() < 2 or value.shape[1] != length:
                raise ValueError(
                    f"Its {name!r} has the shape {tuple(value.shape)}, and dimension 1 is cut as that of input_ids, which is {length}. "
                    "Remove it from the batch, or give it that dimension."
                )
            parts = value.detach().to(self.device).chunk(size, dim=1)
            header[name] = ((parts[0].dtype, tuple(parts[0].shape)), True)
            for pieces, part in zip(sent, parts, strict=True):
                pieces.append(part.contiguous().view(-1).view(torch.uint8))
        return header, [torch.cat(part) for part in sent]


def _bytes(described: tuple[torch.dtype, tuple[int, ...]]) -> int:
    dtype, shape = described
    return math.prod(shape) * dtype.itemsize


def _unpacked(layout: dict[str, tuple[Any, bool]], part: torch.Tensor) -> dict[str, Any]:
    """Return a part as the dict that it was made from."""
    batch, start = {}, 0
    for name, (item, cut) in layout.items():
        if cut:
            dtype, shape = item
            end = start + _bytes(item)
            # A copy, because the bytes of a view need not be aligned for its type.
            item, start = part[start:end].clone().view(dtype).view(shape), end
        batch[name] = item
    return batch


def adapter(accelerator: Run, loader: PreparedLoader) -> UlyssesSPDataLoaderAdapter:
    """Return what hands out parts of a prepared loader's batches. After an engine was made."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    layout: Any = accelerator.parallelism_config  # with a size and a handler, as sequences are shared
    handler, group = layout.sp_handler, parallel_state_sp.get_sequence_parallel_group()
    length = None if handler.sp_seq_length_is_variable else handler.sp_seq_length
    rank = distributed.get_rank(group)
    return UlyssesSPDataLoaderAdapter(loader, rank, group, layout.sp_size, accelerator.device, length)
