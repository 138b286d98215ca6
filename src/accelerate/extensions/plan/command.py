"""`accelerate plan`: which layouts of a training fit on a cluster, how long a step takes, and the configuration file of one of them."""

import argparse
import contextlib
import copy
import dataclasses
import importlib
import inspect
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.base.environment import patch_environment
from accelerate.base.table import size_text, table
from accelerate.commands.utils import brief, make_parser
from accelerate.extensions.configure import config_utils
from accelerate.extensions.plan import estimate, failures
from accelerate.extensions.reports import device_specs
from accelerate.extensions.reports.estimator import (
    WITHIN_LAYERS,
    Fleet,
    Layout,
    Memory,
    StepTime,
    memory,
    step_seconds,
    traffic,
)
from accelerate.extensions.reports.inventory import Profile
from accelerate.launch.errors import LaunchError
from accelerate.runtime.ranks import Ranks

if TYPE_CHECKING:
    import torch
    from torch import nn

# The share of a device's memory for its driver, the library of collectives and fragments; an assumption.
RESERVE = 0.08
_COLUMNS = ("layout", "micro x steps", "recompute", "memory", "activations", "slow link", "step", "limit")
_SHOWN = 12
# Tokens of a sequence, where neither an option nor a program says how many.
_SEQUENCE = 2048


@dataclass(frozen=True)
class Choice:
    """A layout with its needs; `why` says why it does not fit, or is empty."""

    layout: Layout
    memory: Memory | None = None
    time: StepTime | None = None
    slow: int = 0
    why: str = ""


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
    """Return a builder of the model on the meta device, and one of its arguments for a batch and a sequence.

    Args:
        name: a folder or file with a transformers configuration, the name of a model on the Hub, or "package.module:factory".
            The factory returns a model, or a model and a function of batch and sequence that returns the arguments.

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
            hint = "Name an importable package.module:factory."
            raise LaunchError(f"{name!r} gives no model: {brief(error)}. {hint}") from error
        if isinstance(model, tuple):
            model, inputs = model
    else:
        model = estimate.create_empty_model(os.path.expanduser(name), "transformers", trust_remote_code)
    return lambda: copy.deepcopy(model), inputs or inputs_of(model)


def inputs_of(model: "nn.Module") -> Callable[[int, int], dict[str, Any]]:
    """Return what makes arguments for a transformers model: tokens or pictures, with labels where its forward takes them.

    Raises:
        LaunchError: the model's arguments are not known.
    """
    import torch

    main, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    if main not in ("input_ids", "pixel_values"):
        raise LaunchError(
            f"The inputs of {type(model).__name__} are not known (main_input_name is {main!r}). Name a package.module:factory that "
            "returns the model and a function of batch and sequence with the arguments of its forward."
        )
    takes_labels = "labels" in inspect.signature(model.forward).parameters
    one_label = (
        main == "pixel_values" or "Classification" in type(model).__name__ and "Token" not in type(model).__name__
    )

    def arguments(batch: int, sequence: int) -> dict[str, Any]:
        inputs = torch.zeros(batch, sequence, dtype=torch.long)
        labels = torch.zeros(batch, dtype=torch.long) if one_label else inputs.clone()
        if main == "pixel_values":
            sides = config.image_size if isinstance(config.image_size, (tuple, list)) else [config.image_size] * 2
            inputs = torch.zeros(batch, getattr(config, "num_channels", 3), *sides)
        return {main: inputs, **({"labels": labels} if takes_labels else {})}

    return arguments


def load_program(args: argparse.Namespace) -> tuple[Callable[[], "nn.Module"], Callable[..., dict[str, Any]]]:
    """Return what `load` returns, of the model that a program trains; it runs up to the model's first call, as rank 0 of a simulated run.

    Args:
        args: options of the command. The sequence, the micro-batch, the batch of a step and the state of the optimizer become those
            of the program, where they were not given.

    Raises:
        ValueError: the program fails, or calls no model that it has prepared, or calls it without a tensor.
    """
    import torch

    from accelerate.extensions.simulate import simulation
    from accelerate.runtime.torch_private import pytree

    rank_layout = Ranks(0, args.gpus, 0, args.gpus // args.nodes, "torchrun")
    settings = {"accelerate_use_cpu": "true", "accelerate_mixed_precision": args.mixed_precision}
    with patch_environment(**rank_layout.variables, **settings), contextlib.redirect_stdout(sys.stderr):
        call = simulation.first_call(args.script, rank_layout)
    tensors = [leaf for leaf in pytree.tree_leaves(call.arguments) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if not tensors:
        called = f"{args.script[0]} calls {type(call.model).__name__}"
        raise LaunchError(f"{called} without a tensor, so its batch is not known.")
    batch, *more = tensors[0].shape
    # Tokens, or vectors in their place.
    length = more[0] if len(more) == 1 + tensors[0].is_floating_point() else 0

    def size_of(at: int, size: int, ndim: int, samples: int, sequence: int) -> int:
        if at == 0:
            return samples if size == batch else size
        return sequence if size == length and (at == 1 or ndim == 4) else size  # a mask has four dimensions

    def inputs(*sizes: int) -> dict[str, Any]:
        def resized(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            shape = [size_of(at, size, leaf.ndim, *sizes) for at, size in enumerate(leaf.shape)]
            return torch.zeros(shape, dtype=leaf.dtype)

        return pytree.tree_map(resized, call.arguments)

    args.model = f"{args.script[0]} ({type(call.model).__name__})"
    args.sequence = args.sequence or length or 1
    args.micro_batch = args.micro_batch or batch
    args.global_batch = args.global_batch or args.micro_batch * args.gpus * call.accumulation
    args.state = _state(call.optimizers[0]) if call.optimizers else args.state
    return lambda: copy.deepcopy(call.model), inputs


def _state(optimizer: "torch.optim.Optimizer") -> int:
    """Bytes that an optimizer keeps for each number, as a step with a small parameter shows it."""
    import torch

    from accelerate.runtime.torch_private import pytree

    def per_number(states: Any, parameter: torch.Tensor) -> int:
        kept = [leaf for leaf in pytree.tree_leaves(states) if isinstance(leaf, torch.Tensor)]
        return round(sum(leaf.nbytes for leaf in kept) / parameter.numel())

    for parameter, states in optimizer.state.items():
        if states:  # some make them when they are made, and only for their own parameters
            return per_number(states, parameter)
    sample, twin = torch.nn.Parameter(torch.zeros(64, 64)), object.__new__(type(optimizer))
    sample.grad = torch.zeros(64, 64)
    groups = [{**optimizer.param_groups[0], "params": [sample]}]
    vars(twin).update(vars(optimizer), state=defaultdict(dict), param_groups=groups)
    try:
        type(optimizer).step(twin)
    except Exception as error:  # such as one that needs a GPU
        name = type(optimizer).__name__
        print(f"{name} takes no step here ({brief(error)}), so it is counted as Adam.", file=sys.stderr)
        return Layout.state
    return per_number(dict(twin.state), sample)


class Profiles:
    """Measures a model once for each split, dtype of its weights and recomputation: with one sample and two, as memory is linear in them."""

    def __init__(self, build: Callable[[], "nn.Module"], inputs: Callable[..., dict[str, Any]], sequence: int) -> None:
        self._arguments, self._sequence = (build, inputs), sequence
        self._found: dict[Any, tuple[Profile, ...] | str] = {}
        model = build()
        config = getattr(model, "config", None)
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        counts = [getattr(config, name, None) for name in names if getattr(model, "ep_plan", None)]
        # Number of experts of a layer that ranks can share; 0 if they cannot.
        self.experts = next((count for count in counts if isinstance(count, int)), 0)

    def of(self, layout: Layout) -> Profile:
        """Return the profile for a layout; ValueError if the model cannot run so."""
        from accelerate.extensions.plan.activations import measure

        within = layout.tp, layout.cp, layout.sp, layout.ep
        key = (layout.precision, layout.checkpointing, layout.casts, *within)
        if key not in self._found:
            # torch's context parallelism keeps the memory of a rank's own keys
            alone = dataclasses.replace(layout, cp=1, fsdp=layout.shards > 0)
            single, two = (dataclasses.replace(alone, micro_batch=size) for size in (1, 2))
            length = self._sequence // layout.cp
            try:
                self._found[key] = tuple(
                    measure(*self._arguments, size_layout, length, gpu=True) for size_layout in (single, two)
                )
            except ValueError as error:
                self._found[key] = str(error)
        measured = self._found[key]
        if isinstance(measured, str):
            raise ValueError(measured)
        single, two = measured
        profile = two.extended(single, layout.micro_batch)
        if layout.cp == 1:
            return profile
        # Each rank's queries meet the keys of all: arithmetic is a part of that of the full sequence.
        whole = self.of(dataclasses.replace(layout, cp=1, fsdp=True))
        pairs = zip(profile.segments, whole.segments, strict=True)
        parts = (dataclasses.replace(segment, flops=all_of.flops // layout.cp) for segment, all_of in pairs)
        return dataclasses.replace(profile, segments=tuple(parts))


# -- the layouts -------------------------------------------------------------------------------------------------------


def layouts(gpus: int, nodes: int, sequence: int, precision: str, experts: int = 0) -> Iterator[Layout]:
    """Yield the layouts of so many ranks that this package runs, with a micro-batch of one sample; of models with so many experts also with those split."""
    for name, size in [("", 1), *((name, size) for name in WITHIN_LAYERS for size in (2, 4, 8))]:
        # A rank of context parallelism gets a part from the front and one from the back.
        rests = {"cp": sequence % (2 * size), "sp": sequence % size, "ep": not experts or experts % size}
        if gpus // nodes % size or rests.get(name):
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
            split = size if name == "ep" else 1
            if data > nodes > 1 and data % (nodes * split) == 0:
                yield Layout(dp_replicate=nodes, dp_shard=data // nodes, fsdp=True, **common)


def choose(profiles: Profiles, base: Layout, fleet: Fleet, global_batch: int, sizes: Sequence[int]) -> Choice:
    """Return the fastest way to run a layout that fits, over micro-batches of these sizes and recomputation; else why none fits."""
    room = fleet.device.memory * (1 - RESERVE)
    micros = [size for size in sizes if global_batch % (base.batches * size) == 0]
    if not micros:
        batches_text = f" with micro-batches of {sizes[0]}" if sizes[0] > 1 else ""
        why = f"global_batch={global_batch} is not a multiple of its {base.batches} data-parallel ranks{batches_text}"
        return Choice(base, why=why)

    def arranged(micro: int, again: bool) -> Layout:
        steps = global_batch // (base.batches * micro)
        return dataclasses.replace(base, checkpointing=again, micro_batch=micro, accumulation=steps)

    best: Choice | None = None
    least: Choice | None = None
    for again in (False, True):
        wholes = [arranged(micro, False) for micro in micros] if again and best else []
        if (
            wholes
            and min(step_seconds(profiles.of(layout), layout, fleet).total for layout in wholes) >= best.time.total
        ):
            break  # recomputation takes longer with each micro-batch, and smaller ones that would fit are no faster without it
        for layout in (arranged(micro, again) for micro in micros):
            try:
                profile = profiles.of(layout)
            except ValueError as error:
                least = least or Choice(layout, why=str(error))
                break
            needs = memory(profile, layout, fleet.device)
            if needs.total > room:
                if least is None or least.memory is None or needs.total < least.memory.total:
                    least = Choice(layout, needs, why=_advice(needs, layout, fleet))
                break
            time = step_seconds(profile, layout, fleet)
            if best is None or time.total < best.time.total:
                slow = sum(transfer.bytes for transfer in traffic(profile, layout) if fleet.crosses(transfer))
                best = Choice(layout, needs, time, slow)
    return best or least


def _advice(needs: Memory, layout: Layout, fleet: Fleet) -> str:
    """Return what takes the memory, and what makes it less."""
    size, room = size_text(getattr(needs, needs.largest)), size_text(fleet.device.memory)
    if needs.largest == "activations":
        cut = layout.cp * layout.tp * layout.sp > 1
        hint = "a larger cp_size or a shorter --sequence" if cut else "cp_size=2 or tp_size=2"
    elif needs.largest == "gathered":
        hint = "tp_size=2, so that less is gathered at once" if layout.shards else "FSDP2, which has no buckets"
    else:
        hint = "more ranks, tp_size or offload" if layout.shards else "FSDP2, which shards them"
    return f"{needs.largest} {size} of {room}, {size_text(needs.total)} in all: use {hint}"


def plan(profiles: Profiles, fleet: Fleet, args: argparse.Namespace) -> list[Choice]:
    """Return all layouts, fitting ones first and the fastest of them first; offload is tried if none fits."""
    choices = layouts(args.gpus, args.nodes, args.sequence, args.mixed_precision, profiles.experts)
    bases = [dataclasses.replace(base, state=args.state) for base in choices]
    sizes = [args.micro_batch] if args.micro_batch else [2**power for power in range(7)]
    choices = [choose(profiles, base, fleet, args.global_batch, sizes) for base in bases]
    if all(choice.why for choice in choices):
        able = (dataclasses.replace(base, offload=True) for base in bases if base.shards and base.reshard)
        choices += [choose(profiles, base, fleet, args.global_batch, sizes) for base in able]
    return sorted(
        choices,
        key=lambda choice: (bool(choice.why), choice.time.total if choice.time else 0, choice.layout.zero or 0),
    )


# -- the configuration file --------------------------------------------------------------------------------------------


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
        if layout.tp * layout.ep > 1:  # layers are split before FSDP2 shards them, so each rank needs their weights
            content["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] = False
    named = {name: getattr(layout, name) for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    sizes = {f"parallelism_config_{name}_size": size for name, size in named.items() if size > 1}
    if (layout.zero is None and len(sizes) > 1) or layout.tp * layout.cp * layout.sp > 1:
        torch_sp = {"parallelism_config_sp_backend": "torch"} if layout.sp > 1 else {}
        content["parallelism_config"] = sizes | torch_sp
    return content


def in_the_program(layout: Layout) -> str:
    """Return the changes of the training program for a layout, which no configuration file can make."""
    steps = f"Accelerator(gradient_accumulation_steps={layout.accumulation})"
    lines = [f"a batch size of {layout.micro_batch}, and {steps}."]
    if layout.cp * layout.sp > 1:
        otherwise = "without it each rank of a sequence computes all of it"
        lines.append(f"Each batch in `with accelerator.maybe_context_parallel(...)`: {otherwise}.")
    if layout.ep > 1:
        size = f"dp_replicate_size={layout.dp_replicate}, dp_shard_size={layout.dp_shard}, ep_size={layout.ep}"
        config = f"Accelerator(parallelism_config=ParallelismConfig({size}))"
        lines.append(f"{config}, for which there is no entry in the file.")
    if layout.checkpointing and not layout.shards:
        lines.append("model.gradient_checkpointing_enable().")
    return "In the program: " + "\n  ".join(lines)


# What a simulated week reads, or has refused already.
_OF_FAILURES = ("gpus", "failures", "json", "model", "script")


def plan_command(args: argparse.Namespace) -> None:
    """Print the layouts of what `plan_command_parser` parsed, and write a file if it is requested.

    Raises:
        LaunchError: the model, the device or the numbers cannot be used, or, with `--write`, no layout fits.
    """
    for name in ("gpus", "nodes", "sequence", "global_batch", "micro_batch"):
        if (number := getattr(args, name)) is not None and number < 1:
            raise LaunchError(f"--{name} is {number}; it must be at least 1.")
    if args.failures is not None:
        if args.model or args.script:
            what = args.model or args.script[0]
            raise LaunchError(
                f"--failures simulates a cluster, not a model: remove {what!r}, or put NAME=VALUE behind --failures."
            )
        if ignored := sorted(args.nondefault - {*_OF_FAILURES}):
            raise LaunchError(f"--{ignored[0]} has no meaning with --failures. Remove it.")
        failures.run(args.gpus, args.failures, args.json)
        return
    if bool(args.model) == bool(args.script):
        raise LaunchError("Name one of MODEL and --script train.py: the model to plan for.")
    if args.gpu is None:
        raise LaunchError(f"--gpu is missing: the kind of the GPUs, one of {', '.join(device_specs.DEVICES)}.")
    if args.global_batch is None and args.model:
        raise LaunchError("--global_batch is missing: how many samples an optimizer step has, on all ranks together.")
    if not 0 < args.efficiency <= 1 or not 0 <= args.overlap <= 1:
        asked = f"--efficiency is {args.efficiency} and --overlap {args.overlap}"
        raise LaunchError(f"{asked}; pass parts of 1, the first above 0.")
    if args.gpus % args.nodes:
        asked = f"--gpus is {args.gpus}, which --nodes={args.nodes} does not divide"
        raise LaunchError(f"{asked}; name all GPUs of all machines.")
    device, between = device_specs.device_spec(args.gpu), device_specs.link(args.link)
    if args.mixed_precision not in device.flops:
        asked = f"--mixed_precision is {args.mixed_precision}, for which {device.name} has no arithmetic"
        raise LaunchError(f"{asked}; use {' or '.join(device.flops)}.")
    if args.measure:
        device = _measured(device)
    fleet = Fleet(device, args.gpus // args.nodes, between, args.efficiency, args.overlap)
    args.state = Layout.state
    build, inputs = load_program(args) if args.script else load(args.model, args.trust_remote_code)
    args.sequence = args.sequence or _SEQUENCE
    choices = plan(Profiles(build, inputs, args.sequence), fleet, args)
    if args.json:
        print(
            json.dumps([dataclasses.asdict(choice) | {"name": name_of(choice.layout)} for choice in choices], indent=1)
        )
    else:
        _print(args, choices, fleet)
    if args.write:
        best = choices[0]  # fitting ones come first
        if best.why:
            raise LaunchError(f"No layout fits, so {args.write} was not written; the reasons are above.")
        config_utils.check_writable(args.write)
        config_utils.write(args.write, configuration(best.layout, args.nodes))
        see = f"see it by `accelerate launch --config_file {args.write} --dry_run train.py`"
        print(f"{args.write}: {name_of(best.layout)}; {see}.\n{in_the_program(best.layout)}")


def _measured(device: device_specs.DeviceSpec) -> device_specs.DeviceSpec:
    """Return the row with rates of this machine's device; LaunchError if that is another kind."""
    from accelerate.devices import table as devices
    from accelerate.extensions.plan.ceilings import measured

    machine_device = devices.detect()
    name = machine_device.namespace().get_device_name() if machine_device.type != "cpu" else "the CPU"
    if not any(word in name for word in device.words):
        asked = f"--measure takes the rates of this machine's device, which is {name}, and --gpu is {device.name}"
        raise LaunchError(f"{asked}; omit it, or name the kind that is here.")
    return measured(device, machine_device.current())


def _print(args: argparse.Namespace, choices: list[Choice], fleet: Fleet) -> None:
    rows = [
        (
            name_of(choice.layout),
            f"{choice.layout.micro_batch} x {choice.layout.accumulation}",
            "yes" if choice.layout.checkpointing else "no",
            size_text(choice.memory.total),
            size_text(choice.memory.activations),
            size_text(choice.slow),
            f"{choice.time.total:.3g} s",
            choice.time.limit,
        )
        for choice in choices
        if not choice.why
    ]
    where = f"{args.gpus} x {fleet.device.name} on {args.nodes} machine(s)"
    step = f"{args.global_batch} sequences of {args.sequence} a step"
    print(f"{args.model} on {where}, {step}, mixed_precision={args.mixed_precision}\n")
    if rows:
        right = [name for name in _COLUMNS if name not in ("layout", "limit")]
        print(table(_COLUMNS, rows[:_SHOWN], right, rule=True))
    rates = f"{fleet.device.flops[args.mixed_precision] / 1e12:,.0f} TFLOP/s and {fleet.device.bandwidth / 1e12:.2f} TB/s of memory"
    print(f"\nDevice: {rates}, {fleet.device.source}.")
    print(
        f"Step: estimated, with {fleet.efficiency:.0%} of the peak rate, and {fleet.overlap:.0%} of a pass hiding exchanges of data "
        f"parallelism.\nMemory: of one rank at its peak; {RESERVE:.0%} of the device is left for driver, collectives and fragments."
    )
    if left_out := [f"  {name_of(choice.layout)}: {choice.why}" for choice in choices if choice.why]:
        print("\nDo not fit:", *left_out, sep="\n")


def plan_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate plan`, or add it to what `add_subparsers` returned."""
    description = "List the layouts of a training that fit on a cluster, and write the configuration file of the best."
    parser = make_parser("plan", description, subparsers, plan_command)
    add = parser.add_argument
    model = "A config.json or a folder with one, a model of the Hugging Face Hub, or package.module:factory."
    add("model", nargs="?", help=model)
    add("--gpus", type=int, required=True, help="How many GPUs there are, on all machines together.")
    add("--gpu", metavar="NAME", help=f"Their kind: {', '.join(device_specs.DEVICES)}.")
    add("--nodes", type=int, default=1, help="How many machines they are in.")
    sequence = f"Tokens of a sequence; {_SEQUENCE}, or those of the script, by default. Without effect for pictures."
    add("--sequence", type=int, help=sequence)
    batch = "Samples of an optimizer step, of all ranks; by default those of the script on as many ranks."
    add("--global_batch", type=int, help=batch)
    add(
        "--micro_batch", type=int, help="Samples of a micro-batch; by default the script's, or those that are fastest."
    )
    add("--mixed_precision", default="bf16", choices=["no", "fp16", "bf16"], help="Precision of the passes.")
    add("--link", default=device_specs.USUAL_LINK, help=f"What connects machines: {', '.join(device_specs.LINKS)}.")
    add("--measure", action="store_true", help="Take rates that the device of this machine reaches, not the table's.")
    add("--efficiency", type=float, default=0.5, help="What of the peak rate a pass reaches.")
    add("--overlap", type=float, default=0.7, help="What of a pass hides exchanges of data parallelism.")
    add("--trust_remote_code", action="store_true", help="Let the model's own code run.")
    add("--write", metavar="FILE", help="Write the configuration file of the first layout.")
    add("--json", action="store_true", help="Print JSON, with all sizes in bytes.")
    week = "Simulate a week on GPUs that fail, without a model; the output lists the names."
    add("--failures", nargs="*", metavar="NAME=VALUE", help=week)
    script = "A program and its arguments, in place of the model: the one that it trains. The last option."
    add("--script", nargs=argparse.REMAINDER, metavar="train.py", help=script)
    return parser
