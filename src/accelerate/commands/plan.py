"""`accelerate plan`: which layouts of a training fit on a cluster, how long a step takes, and the configuration file of one of them."""

import argparse
import copy
import dataclasses
import importlib
import inspect
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.commands import estimate
from accelerate.commands.config import config_utils
from accelerate.commands.utils import brief, make_parser
from accelerate.devices import specs
from accelerate.diagnostics.estimator import (
    WITHIN_LAYERS,
    Fleet,
    Layout,
    Memory,
    StepTime,
    memory,
    step_seconds,
    traffic,
)
from accelerate.diagnostics.inventory import Profile
from accelerate.diagnostics.table import size_text, table
from accelerate.launch.errors import LaunchError

if TYPE_CHECKING:
    from torch import nn

# Of a device's memory, what its driver, the library of collectives and fragments take; an assumption.
RESERVE = 0.08
_COLUMNS = ("layout", "micro x steps", "recompute", "memory", "activations", "slow link", "step", "limit")
_SHOWN = 12


@dataclass(frozen=True)
class Choice:
    """A layout with what it needs; `why` says what does not fit, or is empty."""

    layout: Layout
    memory: Memory | None = None
    time: StepTime | None = None
    slow: int = 0
    why: str = ""

    @property
    def name(self) -> str:
        """The strategy in words."""
        return name_of(self.layout)


def name_of(layout: Layout) -> str:
    """Return a strategy in words, such as "HSDP 2 x 8, tp_size=2"."""
    if layout.zero is not None:
        first = f"ZeRO {layout.zero}, {layout.batches} ranks"
    elif layout.shards and layout.dp_replicate > 1:
        first = f"HSDP {layout.dp_replicate} x {layout.dp_shard}"
    elif layout.shards:
        first = f"FSDP2 {layout.dp_shard}{'' if layout.reshard else ', kept gathered'}"
    else:
        first = f"DDP {layout.dp_replicate}" if layout.dp_replicate > 1 else ""
    sizes = [f"{name}_size={getattr(layout, name)}" for name in WITHIN_LAYERS if getattr(layout, name) > 1]
    return ", ".join([*filter(None, [first]), *sizes, *(["offload"] if layout.offload else [])]) or "one process"


# -- the model ---------------------------------------------------------------------------------------------------------


def load(
    name: str, trust_remote_code: bool = False
) -> tuple[Callable[[], "nn.Module"], Callable[..., dict[str, Any]]]:
    """Return what builds a model on the meta device, and what makes the arguments of its forward for a batch and a sequence.

    Args:
        name: a folder or file with a transformers configuration, the name of a model on the Hub, or "package.module:factory", where
            the factory returns a model, or a model and a function of batch and sequence that returns the arguments.

    Raises:
        LaunchError: it cannot be found or built.
    """
    inputs = None
    if ":" in name and not os.path.exists(name):
        import torch

        module, _, attribute = name.partition(":")
        try:
            factory = getattr(importlib.import_module(module), attribute)
            with torch.device("meta"):
                model = factory()
        except Exception as error:  # the user's own code
            raise LaunchError(
                f"{name!r} gives no model: {brief(error)}. Name an importable package.module:factory."
            ) from error
        if isinstance(model, tuple):
            model, inputs = model
    else:
        path = os.path.expanduser(name)
        model = estimate.create_empty_model(path, "transformers", trust_remote_code)
    return lambda: copy.deepcopy(model), inputs or inputs_of(model)


def inputs_of(model: "nn.Module") -> Callable[[int, int], dict[str, Any]]:
    """Return what makes arguments for a transformers model: tokens or pictures, with labels where its forward takes them.

    Raises:
        LaunchError: the model's arguments are not known.
    """
    import torch

    main, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    takes_labels = "labels" in inspect.signature(model.forward).parameters
    one_label = "Classification" in type(model).__name__ and "Token" not in type(model).__name__

    def tokens(batch: int, sequence: int) -> dict[str, Any]:
        ids = torch.zeros(batch, sequence, dtype=torch.long)
        labels = torch.zeros(batch, dtype=torch.long) if one_label else ids.clone()
        return {"input_ids": ids, **({"labels": labels} if takes_labels else {})}

    def pictures(batch: int, sequence: int) -> dict[str, Any]:
        size = config.image_size
        sides = size if isinstance(size, (tuple, list)) else (size, size)
        pixels = torch.zeros(batch, getattr(config, "num_channels", 3), *sides)
        return {"pixel_values": pixels, **({"labels": torch.zeros(batch, dtype=torch.long)} if takes_labels else {})}

    if main not in ("input_ids", "pixel_values"):
        raise LaunchError(
            f"What {type(model).__name__} takes is not known (main_input_name is {main!r}). Name a package.module:factory that "
            "returns the model and a function of batch and sequence with the arguments of its forward."
        )
    return tokens if main == "input_ids" else pictures


class Profiles:
    """Measures a model once for each split, precision and recomputation: with one sample and two, as memory is linear in them."""

    def __init__(
        self, build: Callable[[], "nn.Module"], inputs: Callable[..., dict[str, Any]], sequence: int, precision: str
    ) -> None:
        self._arguments = (build, inputs)
        self._sequence, self._precision = sequence, precision
        self._found: dict[Any, tuple[Profile, Profile] | str] = {}
        model = build()
        config = getattr(model, "config", None)
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        counts = [getattr(config, name, None) for name in names if getattr(model, "ep_plan", None)]
        # Of a layer that ranks can share; 0 if they cannot.
        self.experts = next((count for count in counts if isinstance(count, int)), 0)

    def of(self, layout: Layout) -> Profile:
        """Return the profile for a layout; ValueError if the model cannot run so."""
        from accelerate.diagnostics.activations import measure

        key = (
            layout.tp,
            layout.cp,
            layout.sp,
            layout.ep,
            layout.checkpointing,
            layout.shards > 0 or layout.zero is not None,
        )
        if key not in self._found:
            tp, cp, sp, ep, again, cast = key
            options = {"precision": self._precision, "checkpointing": again, "cast": cast, "gpu": True}
            options |= {"tp": tp, "sp": sp, "ep": ep}  # torch's context parallelism keeps what a rank's own keys need
            try:
                one, two = (measure(*self._arguments, batch, self._sequence // cp, **options) for batch in (1, 2))
                self._found[key] = (one, two)
            except ValueError as error:
                self._found[key] = str(error)
        found = self._found[key]
        if isinstance(found, str):
            raise ValueError(found)
        one, two = found
        profile = two.extended(one, layout.micro_batch)
        if layout.cp == 1:
            return profile
        # Each rank's queries meet the keys of all: arithmetic is the part of that of the whole sequence.
        whole = self.of(dataclasses.replace(layout, cp=1, fsdp=True))
        pairs = zip(profile.segments, whole.segments, strict=True)
        parts = (dataclasses.replace(own, flops=all_of.flops // layout.cp) for own, all_of in pairs)
        return dataclasses.replace(profile, segments=tuple(parts))


# -- the layouts -------------------------------------------------------------------------------------------------------


def layouts(gpus: int, nodes: int, sequence: int, precision: str, experts: int = 0) -> Iterator[Layout]:
    """Yield the layouts of so many ranks that this package runs, with a micro-batch of one sample; of models with so many experts also with those split."""
    per_node = gpus // nodes
    powers = [size for size in (2, 4, 8) if per_node % size == 0]
    within = [(), *((name, size) for name in ("tp", "cp", "sp", "ep") for size in powers)]
    # A rank of context parallelism gets a part from the front and one from the back.
    parts = {"cp": lambda size: sequence % (2 * size), "sp": lambda size: sequence % size}
    parts["ep"] = lambda size: not experts or experts % size
    for name, size in ((pair or ("", 1)) for pair in within):
        if name in parts and parts[name](size):
            continue
        data = gpus if name == "ep" else gpus // size
        common = {"precision": precision, **({name: size} if name else {})}
        if not name:
            yield Layout(dp_replicate=data, **common)
            if data > 1:
                yield from (Layout(dp_replicate=data, zero=stage, **common) for stage in (2, 3))
        elif data == 1 and name == "tp":
            yield Layout(**common)
        if data > 1 or name in ("cp", "sp"):
            yield Layout(dp_shard=data, fsdp=True, **common)
            if not name:
                yield Layout(dp_shard=data, fsdp=True, reshard=False, **common)
            if (
                nodes > 1
                and data % nodes == 0
                and data > nodes
                and (data // nodes) % (size if name == "ep" else 1) == 0
            ):
                yield Layout(dp_replicate=nodes, dp_shard=data // nodes, fsdp=True, **common)


def choose(profiles: Profiles, base: Layout, fleet: Fleet, global_batch: int) -> Choice:
    """Return the fastest way to run a layout that fits, over micro-batches and recomputation; else why none fits."""
    room = fleet.device.memory * (1 - RESERVE)
    if global_batch % base.batches:
        return Choice(
            base, why=f"global_batch={global_batch} is not a multiple of its {base.batches} data-parallel ranks"
        )
    share, best, least = global_batch // base.batches, None, None
    for again in (False, True):
        for micro in (size for size in (1, 2, 4, 8, 16, 32, 64) if share % size == 0):
            layout = dataclasses.replace(base, checkpointing=again, micro_batch=micro, accumulation=share // micro)
            try:
                profile = profiles.of(layout)
            except ValueError as error:
                if least is None:
                    least = Choice(layout, why=str(error))
                break
            needs = memory(profile, layout, fleet.device)
            if needs.total > room:
                if least is None or least.memory is None or needs.total < least.memory.total:
                    least = Choice(layout, needs, why=_advice(needs, layout, fleet))
                break
            time = step_seconds(profile, layout, fleet)
            slow = sum(each.bytes for each in traffic(profile, layout) if fleet.crosses(each))
            if best is None or time.total < best.time.total:
                best = Choice(layout, needs, time, slow)
    return best or least


def _advice(needs: Memory, layout: Layout, fleet: Fleet) -> str:
    """Say what takes the memory, and what makes it less."""
    size, room = size_text(getattr(needs, needs.largest)), size_text(fleet.device.memory)
    hints = {
        "activations": "use cp_size=2 or tp_size=2"
        if layout.cp * layout.tp * layout.sp == 1
        else "use a larger cp_size or a shorter --sequence",
        "gathered": "use tp_size=2, so that less is whole at once"
        if layout.shards
        else "use FSDP2, which has no buckets",
    }
    hint = hints.get(
        needs.largest, "use more ranks, tp_size or offload" if layout.shards else "use FSDP2, which shards them"
    )
    return f"{needs.largest} {size} of {room}, {size_text(needs.total)} in all: {hint}"


def plan(
    profiles: Profiles, fleet: Fleet, gpus: int, nodes: int, sequence: int, global_batch: int, precision: str
) -> list[Choice]:
    """Return all layouts, those that fit first and the fastest of them first; offload is tried where none fits."""
    bases = list(layouts(gpus, nodes, sequence, precision, profiles.experts))
    found = [choose(profiles, base, fleet, global_batch) for base in bases]
    if all(each.why for each in found):
        able = (base for base in bases if base.shards and base.reshard)
        found += [choose(profiles, dataclasses.replace(base, offload=True), fleet, global_batch) for base in able]
    return sorted(found, key=lambda each: (bool(each.why), each.time.total if each.time else 0, each.layout.zero or 0))


# -- what is written ---------------------------------------------------------------------------------------------------


def configuration(layout: Layout, nodes: int) -> dict[str, Any]:
    """Return the configuration file of a layout, as `accelerate launch` reads it."""
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if layout.ranks > 1 else "NO",
        "mixed_precision": layout.precision,
        "num_machines": nodes,
        "num_processes": layout.ranks,
    }
    if nodes > 1:
        content |= {"machine_rank": 0, "main_process_ip": "127.0.0.1", "main_process_port": 29500}
    if layout.zero is not None:
        content["distributed_type"] = "DEEPSPEED"
        several = {"deepspeed_multinode_launcher": "standard"} if nodes > 1 else {}
        steps = {"gradient_accumulation_steps": layout.accumulation}
        content["deepspeed_config"] = {"zero_stage": layout.zero, **steps, **several}
    if layout.shards:
        content["distributed_type"] = "FSDP"
        content["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": layout.reshard,
            "fsdp_activation_checkpointing": layout.checkpointing,
            "fsdp_offload_params": layout.offload,
        }
    sizes = {name: getattr(layout, name) for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    if layout.zero is None and sum(size > 1 for size in sizes.values()) > 1 or layout.tp * layout.cp * layout.sp > 1:
        content["parallelism_config"] = {
            f"parallelism_config_{name}_size": size for name, size in sizes.items() if size > 1
        }
        content["parallelism_config"] |= {"parallelism_config_sp_backend": "torch"} if layout.sp > 1 else {}
    return content


def in_the_program(layout: Layout) -> str:
    """Say what the training program has to do for a layout, which no configuration file can."""
    lines = [
        f"a batch size of {layout.micro_batch}, and Accelerator(gradient_accumulation_steps={layout.accumulation})."
    ]
    if layout.cp * layout.sp > 1:
        lines.append(
            "Each batch in `with accelerator.maybe_context_parallel(...)`: without it each rank of a sequence computes all of it."
        )
    if layout.ep > 1:
        size = f"dp_replicate_size={layout.dp_replicate}, dp_shard_size={layout.dp_shard}, ep_size={layout.ep}"
        lines.append(
            f"Accelerator(parallelism_config=ParallelismConfig({size})), for which there is no entry in the file."
        )
    if layout.checkpointing and not layout.shards:
        lines.append("model.gradient_checkpointing_enable().")
    return "In the program: " + "\n  ".join(lines)


def plan_command(args: argparse.Namespace) -> None:
    """Print the layouts of what `plan_command_parser` parsed, and write a file if it is asked for.

    Raises:
        LaunchError: the model, the device or the numbers cannot be used, or, with `--write`, no layout fits.
    """
    for name in ("gpus", "nodes", "sequence", "global_batch"):
        if getattr(args, name) < 1:
            raise LaunchError(f"--{name} is {getattr(args, name)}; it must be at least 1.")
    if not 0 < args.efficiency <= 1 or not 0 <= args.overlap <= 1:
        raise LaunchError(
            f"--efficiency is {args.efficiency} and --overlap {args.overlap}; pass parts of 1, the first above 0."
        )
    if args.gpus % args.nodes:
        raise LaunchError(
            f"--gpus is {args.gpus}, which --nodes={args.nodes} does not divide; name all GPUs of all machines."
        )
    try:
        device, between = specs.device_spec(args.gpu), specs.link(args.link)
    except ValueError as error:
        raise LaunchError(str(error)) from error
    precision = args.mixed_precision
    if precision not in device.flops:
        raise LaunchError(
            f"--mixed_precision is {precision}, for which {device.name} has no arithmetic; use {' or '.join(device.flops)}."
        )
    if args.measure:
        device = _measured(device)
    fleet = Fleet(device, args.gpus // args.nodes, between, args.efficiency, args.overlap)
    build, inputs = load(args.model, args.trust_remote_code)
    found = plan(
        Profiles(build, inputs, args.sequence, precision),
        fleet,
        args.gpus,
        args.nodes,
        args.sequence,
        args.global_batch,
        precision,
    )
    fitting = [each for each in found if not each.why]
    if args.json:
        print(json.dumps([dataclasses.asdict(each) | {"name": each.name} for each in found], indent=1))
    else:
        _print(args, found, fleet)
    if args.write:
        if not fitting:
            raise LaunchError(f"No layout fits, so {args.write} was not written; the reasons are above.")
        config_utils.check_writable(args.write)
        config_utils.write(args.write, configuration(fitting[0].layout, args.nodes))
        layout = fitting[0].layout
        print(
            f"{args.write}: {fitting[0].name}; see it by `accelerate launch --config_file {args.write} --dry_run train.py`.\n"
            f"{in_the_program(layout)}"
        )


def _measured(device: specs.DeviceSpec) -> specs.DeviceSpec:
    """Return the row with rates of this machine's device; LaunchError if that is another kind."""
    from accelerate.devices import table as devices
    from accelerate.diagnostics.ceilings import measured

    here = devices.detect()
    name = here.namespace().get_device_name() if here.type != "cpu" else "the CPU"
    if not any(word in name for word in device.words):
        raise LaunchError(
            f"--measure takes the rates of this machine's device, which is {name}, and --gpu is {device.name}; leave it out, or name the kind that is here."
        )
    return measured(device, here.current())


def _print(args: argparse.Namespace, found: list[Choice], fleet: Fleet) -> None:
    rows = [
        (
            each.name,
            f"{each.layout.micro_batch} x {each.layout.accumulation}",
            "yes" if each.layout.checkpointing else "no",
            size_text(each.memory.total),
            size_text(each.memory.activations),
            size_text(each.slow),
            f"{each.time.total:.3g} s",
            each.time.limit,
        )
        for each in found
        if not each.why
    ]
    where = f"{args.gpus} x {fleet.device.name} on {args.nodes} machine(s)"
    print(
        f"{args.model} on {where}, {args.global_batch} sequences of {args.sequence} a step, mixed_precision={args.mixed_precision}\n"
    )
    if rows:
        right = [name for name in _COLUMNS if name not in ("layout", "limit")]
        print(table(_COLUMNS, rows[:_SHOWN], right, rule=True))
    rates = f"{fleet.device.flops[args.mixed_precision] / 1e12:,.0f} TFLOP/s and {fleet.device.bandwidth / 1e12:.2f} TB/s of memory"
    print(f"\nDevice: {rates}, {fleet.device.source}.")
    print(
        f"Step: estimated, with {fleet.efficiency:.0%} of the peak rate, and {fleet.overlap:.0%} of a pass hiding exchanges of data "
        f"parallelism.\nMemory: of one rank at its peak; {RESERVE:.0%} of the device is left for driver, collectives and fragments."
    )
    left_out = [each for each in found if each.why]
    if left_out:
        print("\nDo not fit:")
        for each in left_out:
            print(f"  {each.name}: {each.why}")


def plan_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate plan`, or add it to what `add_subparsers` returned."""
    description = "List the layouts of a training that fit on a cluster, and write the configuration file of the best."
    parser = make_parser("plan", description, subparsers, plan_command)
    model = "A config.json or a folder with one, a model of the Hugging Face Hub, or package.module:factory."
    parser.add_argument("model", help=model)
    parser.add_argument("--gpus", type=int, required=True, help="How many GPUs there are, on all machines together.")
    parser.add_argument("--gpu", required=True, metavar="NAME", help=f"Their kind: {', '.join(specs.DEVICES)}.")
    parser.add_argument("--nodes", type=int, default=1, help="How many machines they are in.")
    parser.add_argument(
        "--sequence", type=int, default=2048, help="Tokens of a sequence; without effect for pictures."
    )
    parser.add_argument("--global_batch", type=int, required=True, help="Samples of an optimizer step, of all ranks.")
    parser.add_argument(
        "--mixed_precision", default="bf16", choices=["no", "fp16", "bf16"], help="Precision of the passes."
    )
    parser.add_argument("--link", default=specs.USUAL_LINK, help=f"What connects machines: {', '.join(specs.LINKS)}.")
    parser.add_argument(
        "--measure", action="store_true", help="Take rates that the device of this machine reaches, not the table's."
    )
    parser.add_argument("--efficiency", type=float, default=0.5, help="What of the peak rate a pass reaches.")
    parser.add_argument(
        "--overlap", type=float, default=0.7, help="What of a pass hides exchanges of data parallelism."
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="Let the model's own code run.")
    parser.add_argument("--write", metavar="FILE", help="Write the configuration file of the first layout.")
    parser.add_argument("--json", action="store_true", help="Print JSON, with all sizes in bytes.")
    return parser
