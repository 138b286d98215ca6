"""The only estimator of memory, exchanged bytes and step time of a layout of ranks. Pure arithmetic, any rank.

`accelerate plan`, `accelerate estimate-memory` and the advice after running out of memory use it.
`extensions.plan.activations` measures activations; without it, the sums contain only values known from shapes.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from accelerate.extensions.reports.device_specs import DeviceSpec, Link
from accelerate.extensions.reports.inventory import Inventory, Item, Profile

# Bytes a second between a device and its host, in one direction: PCIe 4.0 x16.
_HOST_LINK = 32e9
# Dimensions of the mesh whose exchanges the next operation needs.
WITHIN_LAYERS = ("tp", "cp", "sp", "ep")
# The bytes of a number in the forward and backward pass, by mixed_precision.
COMPUTE_BYTES = {"no": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Layout:
    """How ranks share a training, in the words of `ParallelismConfig` and the plugins; sizes multiply to the number of ranks.

    Attributes:
        fsdp: parameters are sharded by FSDP2; where it is False, `dp_shard` and `cp` are above 1.
        zero: the ZeRO stage of DeepSpeed over all data-parallel ranks; None without it.
        reshard: FSDP frees gathered parameters after the forward pass (`fsdp_reshard_after_forward`).
        checkpointing: activations are computed again in the backward pass.
        accumulation: micro-batches in a step.
        micro_batch: samples of a micro-batch, for the ranks that share one.
        precision: what `mixed_precision` takes.
        offload: parameters, gradients and optimizer state rest in host memory, which FSDP and ZeRO 3 can.
        bucket: numbers that DeepSpeed reduces at a time, its `reduce_bucket_size`.
        state: bytes that the optimizer keeps for each number; 8 are those of Adam's moments.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    sp: int = 1
    ep: int = 1
    fsdp: bool = False
    zero: int | None = None
    reshard: bool = True
    checkpointing: bool = False
    accumulation: int = 1
    micro_batch: int = 1
    precision: str = "no"
    offload: bool = False
    bucket: int = 500_000_000
    state: int = 8

    @property
    def ranks(self) -> int:
        """How many processes it is for."""
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.sp

    @property
    def batches(self) -> int:
        """How many micro-batches are worked on at a time."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Over how many ranks FSDP shards parameters; 0 without it."""
        over = self.dp_shard * self.cp * self.sp
        return over if self.zero is None and (self.fsdp or self.dp_shard * self.cp > 1) else 0

    @property
    def casts(self) -> bool:
        """Whether parameters are handed to forward in the dtype of the precision, where otherwise autocast copies them."""
        return self.shards > 0 or self.zero is not None

    @property
    def compute(self) -> int:
        """Bytes of a number in the passes."""
        return COMPUTE_BYTES[self.precision]


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its peak, by kind; `host` has those in host memory.

    Attributes:
        gathered: parameters that are unsharded for a time, buckets and buffers of collectives, copies in half precision.
        activations: with temporaries.
        host: the data that stays in host memory.
        when: the segment of the step that has the peak.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int = 0
    activations: int = 0
    host: int = 0
    when: str = ""

    @property
    def total(self) -> int:
        """The bytes on the device."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.activations

    @property
    def largest(self) -> str:
        """The kind that takes the most."""
        kinds = ("parameters", "gradients", "optimizer", "gathered", "activations")
        return max(kinds, key=lambda kind: getattr(self, kind))


# -- what rests --------------------------------------------------------------------------------------------------------


def resting(model: Inventory, layout: Layout) -> Memory:
    """Return a rank's memory between steps with Adam, and as "gathered" that during a step, as far as shapes determine it.

    Half-precision types stand for mixed precision. The rank is the one with the highest need.
    """
    compute, ranks = layout.compute, layout.batches
    numbers, trained = (sum(item.elements for item in part.parameters) for part in (model, model.trained))
    buffers, copies = model.size - 4 * numbers, compute * numbers if compute < 4 else 0
    if layout.zero is not None:
        # DeepSpeed lays parameters end to end, and fills up to a multiple of two numbers a rank.
        frozen, part = numbers - trained, 2 * math.ceil(trained / (2 * ranks))
        weights = compute * (part + frozen // ranks if layout.zero == 3 else numbers)
        gradients = compute * (part if layout.zero >= 2 else trained)
        exchanged = 2 * (model.largest // 4) if layout.zero == 3 else layout.bucket
        gathered = 0 if ranks == 1 else compute * exchanged
        return Memory(weights + buffers, gradients, (4 + layout.state) * part, gathered)
    if layout.shards:
        total, local = (sum(_cut(item, layout)[1] for item in part.parameters) for part in (model, model.trained))
        return Memory(4 * total + buffers, 4 * local, layout.state * local, compute * _whole(model, layout.reshard))
    gathered = copies + (0 if ranks == 1 else 4 * trained)
    return Memory(4 * numbers + buffers, 4 * trained, layout.state * trained, gathered)


def _cut(item: Item, layout: Layout) -> tuple[int, int]:
    """Numbers of a tensor, in full and on the first rank. FSDP shards the first dimension: that rank has the most rows, others are padded."""
    rows, *row = item.shape or (1,)
    ranks = max(1, layout.shards // item.split)
    local_numbers = math.ceil(rows / ranks) * math.prod(row)
    return local_numbers * ranks, local_numbers


def _units(model: Inventory, layout: Layout) -> tuple[Counter[str], Counter[str]]:
    """Numbers of each unit of FSDP, in full and on the first rank."""
    whole, local_counts = Counter[str](), Counter[str]()
    for item in model.parameters:
        counts = _cut(item, layout)
        whole[item.block] += counts[0]
        local_counts[item.block] += counts[1]
    return whole, local_counts


def _whole(model: Inventory, again: bool) -> int:
    """Numbers that are unsharded at once under FSDP: weights of blocks, and the gradients of the last computed block."""
    counted = Counter[str]()
    for item in model.parameters:
        counted[item.block] += item.elements
    root = counted.pop("", 0)
    blocks = sorted(counted.values(), reverse=True)
    # The next block is fetched while one is computed. Parameters outside of blocks stay, since they are used first and last.
    return root + sum(blocks[:2] if again else blocks) + max([root, *blocks])


# -- the peak of a step ------------------------------------------------------------------------------------------------


def memory(profile: Profile, layout: Layout, device: DeviceSpec | None = None) -> Memory:
    """Return the peak of a step on the rank with the highest need, for a profile of the layout's micro-batch and split.

    The profile is of a pass with a device's kernels (`measure(gpu=True)`). Without a device the ranks are processes on a CPU.
    """
    rest = resting(profile.inventory, layout)
    moments = _sharded_moments if layout.shards else _whole_moments
    moments_of_step = list(moments(profile, layout, rest)) + [_optimizer_step(profile.inventory, layout, rest, device)]
    best = max(moments_of_step, key=lambda moment: moment.total)
    if device is not None:
        # Context parallelism on devices gathers keys and values of one layer at a time, and their gradients in backward.
        layers = len({segment.unit for segment in profile.segments if segment.unit}) or 1
        keys = 2 * layout.compute * profile.keys * layout.cp // layers if layout.cp > 1 else 0
        best = replace(best, activations=best.activations + device.workspace, gathered=best.gathered + keys)
    if not layout.offload:
        return best
    host = rest.parameters + rest.gradients + rest.optimizer
    return Memory(0, 0, 0, best.gathered, best.activations, host, best.when)


def _optimizer_step(model: Inventory, layout: Layout, rest: Memory, device: DeviceSpec | None) -> Memory:
    """Adam's temporaries with all gradients: on devices torch steps all tensors together, on the CPU one by one with two of its size."""
    sizes = [4 * _cut(item, layout)[1] for item in model.trained.parameters]
    gradients, buckets = rest.gradients, rest.gradients if layout.batches > 1 and not layout.shards else 0
    if layout.zero is not None:  # one tensor: the optimizer has fp32 weights and fp32 gradients for it
        gradients, buckets = 4 * rest.optimizer // (4 + layout.state), 0
        sizes = [gradients]
    temporary = sum(sizes) if device is not None else 2 * max(sizes, default=0)
    return Memory(rest.parameters, gradients, rest.optimizer, buckets, temporary, when="optimizer")


def _whole_moments(profile: Profile, layout: Layout, rest: Memory) -> Iterable[Memory]:
    """Yield the peak of each segment of a rank with unsharded parameters: one process, DDP, tensor parallelism, ZeRO below 3."""
    zero, kept = layout.zero, layout.accumulation > 1
    buckets = rest.gradients if zero is None and layout.batches > 1 else 0
    partial = zero is not None and zero >= 2
    gradients, filled = rest.gradients if kept or zero == 3 else 0, 0
    for segment in profile.segments:
        working = rest.gathered if zero == 3 or zero is not None and segment.backward else buckets
        peak = segment.peak - (segment.created if partial else 0)
        yield _moment(rest, gradients, working, peak, segment.name)
        if not (kept or partial):
            gradients += segment.created
        filled += segment.created
        if zero in (1, 2) and (filled >= working > 0 or segment is profile.segments[-1]):
            # A bucket that is full is copied, to be reduced, and the rank keeps its part of it.
            copied, filled = min(filled, working), 0
            yield _moment(rest, rest.gradients, working + copied, segment.end, "reduction")


def _moment(rest: Memory, gradients: int, gathered: int, activations: int, when: str) -> Memory:
    return Memory(rest.parameters, gradients, rest.optimizer, gathered, activations, when=when)


def _sharded_moments(profile: Profile, layout: Layout, rest: Memory) -> Iterable[Memory]:
    """Yield the peak of each segment under FSDP2, whose units are gathered, computed and reduced one after the other.

    A gathered unit is received in one buffer and copied out of it: in forward the buffer stays until the next unit's, in backward
    it is that of the unit before, fetched ahead. In backward the buffer of the last reduction stays as well.
    """
    unit = {name: layout.compute * size for name, size in _units(profile.inventory, layout)[0].items()}
    trained, local_trained = _units(profile.inventory.trained, layout)
    root = unit.pop("", 0)
    kept_gathered = 0 if layout.reshard else sum(unit.values())
    order = [segment.unit for segment in profile.segments if not segment.backward and segment.unit in unit]
    before = dict(zip(order[1:], order, strict=False))
    sharded = rest.gradients if layout.accumulation > 1 else 0
    whole = layout.compute * trained.total() if layout.accumulation > 1 else 0  # no_sync keeps unsharded gradients
    received, reduced, of_root = root, 0, 0
    for segment in profile.segments:
        unit_size, name = unit.get(segment.unit, 0), segment.unit
        present = root + (unit_size if layout.reshard else kept_gathered)
        if not segment.backward:
            received = unit_size or received
            yield _moment(rest, sharded + whole, present + received, segment.peak, segment.name)
            continue
        following = before.get(name) if name else order[-1] if order and not reduced else None
        ahead = unit[following] if following and layout.reshard else 0
        yield _moment(rest, sharded + whole + of_root, present + ahead + reduced, segment.peak, segment.name)
        if name:
            # The gradients of the unit are copied into a buffer, which replaces that of the reduction before.
            reduced = layout.compute * trained[name]
            present = root + kept_gathered + ahead + reduced
            yield _moment(rest, sharded + of_root + segment.created, present, segment.end, segment.name)
            sharded += 4 * local_trained[name] if layout.accumulation == 1 else 0
            if layout.dp_replicate > 1 and layout.compute < 4:
                # Tensors exchanged between copies stay until the pass ends, next to the fp32 gradients.
                sharded += layout.compute * local_trained[name]
        else:
            of_root += segment.created
    yield _moment(rest, sharded + of_root, root, 0, "reduction")


# -- exchanges ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """The exchange of one rank in a step over one dimension of the mesh by one kind of collective.

    Attributes:
        ranks: the number of ranks of the group.
        stride: the number of ranks between neighbours of the group.
        bytes: of the full tensors: the output of an all-gather, the input of a reduce-scatter, the tensor of an all-reduce.
    """

    dimension: str
    collective: str
    ranks: int
    stride: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a ring."""
        rounds = 2 if self.collective == "all_reduce" else 1
        return rounds * self.bytes * (self.ranks - 1) / self.ranks


def traffic(profile: Profile, layout: Layout) -> list[Transfer]:
    """Return a rank's exchanges in a step, for a profile like that of `memory`."""
    model, compute, windows = profile.inventory, layout.compute, layout.accumulation
    numbers, trained = (sum(item.elements for item in inventory.parameters) for inventory in (model, model.trained))
    inner = layout.tp * layout.sp * layout.cp
    transfers: list[Transfer] = []

    def add(dimension: str, collective: str, ranks: int, stride: int, size: float) -> None:
        if ranks > 1 and size:
            transfers.append(Transfer(dimension, collective, ranks, stride, int(size)))

    if layout.shards:
        for dimension, split in {"efsdp": layout.ep, "dp_shard": 1}.items() if layout.ep > 1 else [("dp_shard", 1)]:
            part = replace(model, items=tuple(item for item in model.items if item.split == split))
            units, (reduced, trained_local) = _units(part, layout)[0], _units(part.trained, layout)
            ranks, stride = layout.shards // split, layout.tp * split
            gathered = 2 * units.total() - units.get("", 0) if layout.reshard else units.total()
            add(dimension, "all_gather", ranks, stride, windows * compute * gathered)
            add(dimension, "reduce_scatter", ranks, stride, compute * reduced.total())
            stride = layout.tp * layout.shards
            add("dp_replicate", "all_reduce", layout.dp_replicate, stride, compute * trained_local.total())
    elif layout.zero is not None:
        reduction, times = ("all_reduce", 1) if layout.zero < 2 else ("reduce_scatter", windows)
        gathered = 2 * windows * numbers if layout.zero == 3 else trained
        add("dp_replicate", reduction, layout.batches, inner, compute * trained * times)
        add("dp_replicate", "all_gather", layout.batches, inner, compute * gathered)
    else:
        add("dp_replicate", "all_reduce", layout.dp_replicate, inner, 4 * trained)
        add("dp_replicate", "broadcast", layout.dp_replicate, inner, model.size - 4 * numbers)
    split_sizes = Counter[str]()
    for name, size in (pair for segment in profile.segments for pair in segment.split):
        split_sizes[name] += size * windows
    axis = next((axis for axis in WITHIN_LAYERS if getattr(layout, axis) > 1), "tp")
    for name, size in split_sizes.items():
        add(axis, name, getattr(layout, axis), 1 if axis == "tp" else layout.tp, size)
    if layout.cp > 1 and not split_sizes:
        keys = windows * compute * profile.keys * layout.cp  # keys and values of all ranks, forward and backward
        add("cp", "all_gather", layout.cp, layout.tp, 2 * keys)
        add("cp", "reduce_scatter", layout.cp, layout.tp, keys)
    return transfers


# -- how long it takes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fleet:
    """The devices that a layout runs on: so many machines with so many ranks each.

    Attributes:
        between: the link between machines.
        efficiency: what of the peak rate a pass reaches; an assumption.
        overlap: what of the time of a pass hides exchanges of data parallelism; an assumption.
    """

    device: DeviceSpec
    per_node: int
    between: Link
    efficiency: float = 0.5
    overlap: float = 0.7

    def crosses(self, transfer: Transfer) -> bool:
        """Return whether a group reaches over several machines."""
        return transfer.ranks * transfer.stride > self.per_node

    def computing(self, flops: Mapping[str, float]) -> float:
        """Return how long floating-point operations take, by their precision."""
        rates = self.device.flops
        return sum(count / rates.get(kind, rates["no"]) for kind, count in flops.items()) / self.efficiency

    def seconds(self, transfer: Transfer) -> float:
        """Return the duration of an exchange without others."""
        return transfer.sent / (self.between if self.crosses(transfer) else self.device.node).bytes_per_second


@dataclass(frozen=True)
class StepTime:
    """An estimate of a step, in seconds: arithmetic, blocking exchanges, and other exchanges that arithmetic does not hide."""

    arithmetic: float
    waiting: float
    exposed: float

    @property
    def total(self) -> float:
        """The seconds of a step."""
        return self.arithmetic + self.waiting + self.exposed

    @property
    def limit(self) -> str:
        """The largest share."""
        names = ("arithmetic", "exchanges within layers", "exchanges of data parallelism")
        return max(zip((self.arithmetic, self.waiting, self.exposed), names, strict=True), key=lambda part: part[0])[1]


def step_seconds(profile: Profile, layout: Layout, fleet: Fleet) -> StepTime:
    """Return an estimate of the time of a step of a layout: floating-point operations at the stated efficiency, bytes over the stated links."""
    arithmetic = fleet.computing({layout.precision: profile.flops * layout.accumulation})
    # Weights that are offloaded come from the host, and gradients go there.
    offloaded = 2 * memory(profile, layout).host / 4 / _HOST_LINK if layout.offload else 0.0
    return step_time(arithmetic, traffic(profile, layout), fleet, offloaded)


def step_time(arithmetic: float, sent: Iterable[Transfer], fleet: Fleet, offloaded: float = 0.0) -> StepTime:
    """Return an estimate of a step with so many seconds of arithmetic and the exchanges `sent`.

    Exchanges within layers (tensor, context, sequence and expert parallelism) block. The others, and the `offloaded` seconds,
    hide behind the stated part of the arithmetic.
    """
    # Experts are spread along the shards of a mesh, and all-to-all exchanges there are those of tokens.
    within = [transfer.dimension in WITHIN_LAYERS or transfer.collective == "all_to_all" for transfer in sent]
    seconds = list(zip(within, map(fleet.seconds, sent), strict=True))
    waiting = sum(duration for within, duration in seconds if within)
    hidden = offloaded + sum(duration for within, duration in seconds if not within)
    return StepTime(arithmetic, waiting, max(0.0, hidden - fleet.overlap * arithmetic))
