"""Tensor parallelism: the layers of a model are sharded over the ranks of the mesh's dimension `tp`.

A plan maps patterns of module names to styles. It comes from the user, or from the model itself (`tp_plan`), unless
transformers sharded the model when it loaded it. Everything is checked before anything is changed.

Parameters without an entry become replicated DTensors, since optimizers with `foreach` or `fused` (the default on GPUs)
refuse plain tensors next to DTensors. With FSDP2 they stay plain, and `fully_shard` makes DTensors of them.
"""

import difflib
import fnmatch
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from accelerate.base._warn import warn_user
from accelerate.comm.torch_dist import same_on_all
from accelerate.extensions.same_model.consistency import take_from_first
from accelerate.modules.optimizer_remap import named, remap_optimizers, tie, ties
from accelerate.modules.unwrap import is_compiled_module
from accelerate.runtime import torch_private
from accelerate.runtime.run import Run
from accelerate.strategies.mesh import submesh
from accelerate.strategies.shard import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_HELP = (
    "Give a plan, ParallelismConfig(tp_size={size}, tp_handler=TorchTensorParallelConfig(plan={{'layers.*.up': 'colwise', "
    "'layers.*.down': 'rowwise'}})), or take a transformers model that has one (`model.tp_plan`)"
)


def prepare(accelerator: Run, objects: Sequence[Any]) -> tuple[Any, ...]:
    """Cut the models among the objects, in place, over the mesh's dimension `tp`; the first rank's weights win.

    All ranks. Tied parameters stay tied, frozen ones frozen. A model that is cut over these ranks already is left as
    it is, but for its plain parameters. Raises ValueError before anything is changed, on all ranks.
    """
    mesh = submesh(accelerator.torch_device_mesh, "tp")
    if mesh is None or mesh.size() == 1:
        return tuple(objects)
    models = [item._orig_mod if is_compiled_module(item) else item for item in objects if isinstance(item, nn.Module)]
    models = [model for model in models if next(model.parameters(), None) is not None and not is_sharded(model)]
    user_plan = getattr(accelerator.parallelism_config.tp_handler, "plan", None)
    plans = [None if _is_cut(model, mesh) else resolve(model, user_plan, mesh.size()) for model in models]
    if any(isinstance(part, nn.Dropout) and part.p > 0 for model in models for part in model.modules()):
        _compare_seeds(mesh)
    for model, plan in zip(models, plans, strict=True):
        before = named(model)
        if plan is None:
            _adopt(model, mesh)
        else:
            cut(model, plan, mesh)
            for buffer in model.buffers():
                if not isinstance(buffer, DTensor):
                    take_from_first(buffer, torch.device(mesh.device_type), mesh.get_group())
        _place_others(model, mesh, keep_plain=accelerator.is_fsdp2)
        remap_optimizers(accelerator, model, before)
    return tuple(objects)


def _prepare_tp(accelerator: Any, *args: Any) -> tuple[Any, ...]:
    """Shard the layers of the models among the objects, over the mesh's tensor-parallel dimension.

    Collective: call on every rank.
    """
    return prepare(accelerator, args)


def _compare_seeds(mesh: "DeviceMesh") -> None:
    """Warn if ranks that share layers would drop different elements of activations that all of them have in full."""
    if same_on_all(torch.initial_seed(), mesh.device_type, mesh.get_group()):
        return
    seeds: list[int] = [0] * mesh.size()
    dist.all_gather_object(seeds, torch.initial_seed(), group=mesh.get_group())
    if mesh.get_local_rank() == 0:
        warn_user(
            f"torch was seeded with {seeds} on the {mesh.size()} ranks that share layers (tensor parallelism), so dropout would zero "
            "other elements on each. Call set_seed(seed) with one seed, device_specific=True only after the Accelerator."
        )


# -- models that are cut already -----------------------------------------------------------------------------------


def _is_cut(model: nn.Module, mesh: "DeviceMesh") -> bool:
    """Return whether a model is cut over the ranks of `mesh`; ValueError if it is spread over others."""
    is_cut = False
    spread = [(name, value) for name, value in model.named_parameters() if isinstance(value, DTensor)]
    for name, value in spread:
        parameter_mesh = value.device_mesh
        dimensions = parameter_mesh.mesh_dim_names or ()
        shared = next((axis for axis in ("tp", "ep") if axis in dimensions), None)
        if shared is None and dimensions:
            continue
        if parameter_mesh.ndim > 1 and shared:
            parameter_mesh = parameter_mesh[shared]
        if parameter_mesh.mesh.flatten().tolist() != mesh.mesh.flatten().tolist():
            raise ValueError(
                f"tp_size is {mesh.size()}, on the ranks {mesh.mesh.flatten().tolist()}, but the parameter {name!r} of "
                f"{type(model).__name__} is spread over {parameter_mesh.size()} processes, the ranks {parameter_mesh.mesh.flatten().tolist()}. Load "
                f"the model without tp_plan, and it is cut by its own plan; or set tp_size={parameter_mesh.size()}."
            )
        is_cut = True
    if spread and not is_cut:
        name, value = spread[0]
        raise ValueError(
            f"The parameter {name!r} of {type(model).__name__} is sharded over {value.device_mesh} already. Tensor parallelism "
            "comes first: pass the model to `accelerator.prepare` before it is sharded."
        )
    return is_cut


def _adopt(model: nn.Module, mesh: "DeviceMesh") -> None:
    """Put a model that transformers cut on our mesh of the same ranks: `fully_shard` joins slices of one mesh."""
    sum_replicas(model, mesh)
    group = mesh.get_group().group_name
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if type(module) is nn.Linear and isinstance(module.weight, DTensor):
            # PEFT writes the local size into LoRA's factors, where transformers reads the full size.
            module.out_features, module.in_features = module.weight.shape
        for name, value in module._parameters.items():
            if not isinstance(value, DTensor) or value.device_mesh.ndim > 1:
                continue
            if not {"tp", "ep"} & {*(value.device_mesh.mesh_dim_names or ("tp",))}:
                continue
            # Slices of one mesh share their group; of two meshes they do not, unless it is that of all processes.
            if value.device_mesh.get_group().group_name == group:
                continue
            if id(value) not in moved:
                local = value.detach().to_local()
                ours = DTensor.from_local(
                    local, mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
                )
                moved[id(value)] = nn.Parameter(ours, requires_grad=value.requires_grad)
            module._parameters[name] = moved[id(value)]


def sum_replicas(model: nn.Module, mesh: "DeviceMesh") -> None:
    """Sum the gradients of parameters that each rank has in full and uses on its heads, instead of transformers' forward."""
    prefix, plan = _own_plan(model)
    summed = {f"{prefix}{key}": word for key, word in plan.items() if word == "replicated_with_grad_allreduce"}
    modules = dict(model.named_modules())
    for name in _match(model, summed, strict=False):
        # Transformers hooks the gradient of a leaf. A replicated DTensor's plain view and FSDP's gathered tensor are not the
        # optimizer's parameter, and without synchronisation FSDP adds the unsummed gradient to it.
        if vars(modules[name]).pop("forward", None) is not None:
            SummedReplica()._apply(modules[name], mesh)


# -- the plan --------------------------------------------------------------------------------------------------


def resolve(model: nn.Module, user_plan: Mapping[str, Any] | None, size: int) -> dict[str, Any]:
    """Return the torch ParallelStyle of each module that a plan cuts; ValueError if the model cannot be cut so."""
    prefix, plan = ("", user_plan) if user_plan else _own_plan(model)
    if not plan:
        raise ValueError(
            f"tp_size is {size}, but {type(model).__name__} has no tensor-parallel plan: nothing says how to cut it. "
            f"{_HELP.format(size=size)}."
        )
    matched = _match(model, {f"{prefix}{key}": style for key, style in plan.items()}, strict=bool(user_plan))
    unknown = {key: word for key, word in plan.items() if isinstance(word, str) and word not in WORDS}
    if not user_plan:  # a model's own plan has entries for parts that this model may lack
        names = [name for pairs in (model.named_modules(), model.named_parameters()) for name, _ in pairs]
        unknown = {k: word for k, word in unknown.items() if any(_fits(name, f"{prefix}{k}") for name in names)}
    if unknown:
        entries = ", ".join(f"{key!r}: {word!r}" for key, word in unknown.items())
        raise ValueError(
            f"The tensor-parallel plan of {type(model).__name__} has entries whose meaning is not known here: {entries}. Known "
            f"words: {', '.join(sorted(WORDS))}; or give torch ParallelStyle objects. Transformers applies its own words "
            "itself to a model loaded with from_pretrained(..., tp_plan='auto') while tp_size is the number of processes."
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = {name: getattr(modules[name], "base_layer", modules[name]) for name in matched}
    styles = {name: WORDS[word](layers[name]) if isinstance(word, str) else word for name, word in matched.items()}
    styles = _with_adapters(modules, {name: style for name, style in styles.items() if style is not None})
    _check_styles(model, modules, styles, size)
    return styles


def _with_adapters(modules: Mapping[str, nn.Module], styles: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the style of a layer with LoRA by styles of its parts: the layer, and the factor on the sharded side."""
    expanded: dict[str, Any] = {}
    for name, style in styles.items():
        module = modules[name]
        layer = getattr(module, "base_layer", None)
        # In y = W x + B A x, W and B are sharded for output columns, W and A for input rows.
        factor = {0: "lora_B", 1: "lora_A"}.get(cut_dimension(style, layer, "weight"), "")
        if (
            not isinstance(layer, nn.Linear)
            or not hasattr(module, factor)
            or any(getattr(module, "use_dora", {}).values())
        ):
            expanded[name] = style  # another adapter's layer is refused, as any module that no style cuts
        else:
            expanded |= dict.fromkeys(
                [f"{name}.base_layer", *(f"{name}.{factor}.{key}" for key in getattr(module, factor))], style
            )
    return expanded


def _own_plan(model: nn.Module) -> tuple[str, Mapping[str, str]]:
    """Return the plan that a model or the outermost part of it carries, and the prefix of that part's names."""
    for name, module in model.named_modules():
        # Its own: what PEFT puts around a model answers with the model's attributes.
        attributes = [key for key in ("tp_plan", "_tp_plan") if inspect.getattr_static(module, key, None) is not None]
        for plan in [getattr(module, key) for key in attributes]:
            if isinstance(plan, Mapping) and plan:
                return (f"{name}." if name else ""), plan
    return "", {}


def _fits(name: str, pattern: str) -> bool:
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatch.fnmatchcase, parts, pattern_parts))


def _match(model: nn.Module, plan: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """Return a plan's style of each module that it names; a name without wildcards comes before a pattern."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    matches: dict[str, tuple[str, Any]] = {}
    for pattern in sorted(plan, key=lambda key: any(mark in key for mark in "*?[")):
        fitting = [name for name in names if _fits(name, pattern)]
        if not fitting and strict:
            shapes = sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names})
            near = difflib.get_close_matches(pattern, shapes, n=5, cutoff=0.3) or shapes[:5]
            raise ValueError(
                f"The entry {pattern!r} of the tensor-parallel plan matches no module of {type(model).__name__}. Near it: "
                f"{', '.join(map(repr, near))}."
            )
        for name in fitting:
            first_match = matches.setdefault(name, (pattern, plan[pattern]))
            exact = first_match[0] == name
            if not exact and first_match[1] != plan[pattern]:
                raise ValueError(
                    f"Two entries of the tensor-parallel plan match the module {name!r}: {first_match[0]!r} ({first_match[1]!r}) and "
                    f"{pattern!r} ({plan[pattern]!r}). Make them exclude each other, or name the module without wildcards."
                )
    return {name: value for name, (_, value) in matches.items()}


def _check_styles(model: nn.Module, modules: dict[str, nn.Module], styles: Mapping[str, Any], size: int) -> None:
    """Check what styles can be checked for: kinds of modules, sizes, heads, tied parameters."""
    for name, style in styles.items():
        module = modules[name]
        if not isinstance(style, ParallelStyle):
            raise ValueError(
                f"The tensor-parallel plan has {style!r} ({type(style).__name__}) for the module {name!r}; give a word such as "
                "'colwise', or an object of torch.distributed.tensor.parallel such as ColwiseParallel()."
            )
        if cut_dimension(style, module, "weight") is None:
            continue
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise ValueError(
                f"The tensor-parallel plan cuts {name!r} with {type(style).__name__}, which torch has for nn.Linear and "
                f"nn.Embedding only, and it is a {type(module).__module__}.{type(module).__qualname__}."
            )
        for entry, parameter in module.named_parameters(recurse=False):
            dimension = cut_dimension(style, module, entry)
            if dimension is not None and parameter.shape[dimension] % size:
                extent = parameter.shape[dimension]
                raise ValueError(
                    f"{name}.{entry} of shape {tuple(parameter.shape)} cannot be cut over tp_size={size} ranks: {extent} = "
                    f"{extent // size} x {size} + {extent % size}. Choose a tp_size that divides it, leave the module out of the plan, "
                    f"or pad a vocabulary: model.resize_token_embeddings(pad_to_multiple_of={size})."
                )
    _check_heads(model, styles, size)
    _check_ties(model, modules, styles)


def _check_heads(model: nn.Module, styles: Mapping[str, Any], size: int) -> None:
    cut = [name for name, style in styles.items() if keeps_output_cut(style)]
    cut = [name for name in cut if re.search(r"att(entio)?n", name.lower())]
    config = getattr(model, "config", None)
    if not cut or config is None:
        return
    if callable(getattr(config, "get_text_config", None)):
        config = config.get_text_config()
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % size:
            raise ValueError(
                f"The tensor-parallel plan cuts attention by heads ({cut[0]!r}), but {field} is {heads}, which tp_size={size} "
                f"does not divide: {heads} = {heads // size} x {size} + {heads % size}. Remove attention from the plan."
            )


def _check_ties(model: nn.Module, modules: dict[str, nn.Module], styles: Mapping[str, Any]) -> None:
    """Refuse a plan that cuts one tied parameter in two ways."""
    of_module = {id(modules[name]): style for name, style in styles.items()}
    for _, names in ties(model):
        places = [(modules[owner], entry) for owner, _, entry in (name.rpartition(".") for name in names)]
        ways = [cut_dimension(of_module.get(id(module)), module, entry) for module, entry in places]
        if len(set(ways)) > 1:
            raise ValueError(
                f"{' and '.join(names)} are one tied parameter, and the tensor-parallel plan cuts it along different dimensions "
                f"({', '.join(map(str, ways))}; None is unsharded). For an embedding tied to its output layer, plan the embedding as "
                "'embedding_rowwise' and the layer as 'colwise_rep', or omit both."
            )


# -- cutting ----------------------------------------------------------------------------------------------------


def cut(model: nn.Module, styles: Mapping[str, Any], mesh: "DeviceMesh") -> None:
    """Apply the styles, and restore properties that torch's styles lose: ties, and which parameters are frozen."""
    tied = ties(model)
    trains = {name: value.requires_grad for name, value in model.named_parameters(remove_duplicate=False)}
    modules = dict(model.named_modules(remove_duplicate=False))
    # A module may have several names, and is cut once.
    for module, style in {id(modules[name]): (modules[name], style) for name, style in styles.items()}.values():
        parallelize_module(module, mesh, style)
    tie(model, tied)
    for name, value in model.named_parameters(remove_duplicate=False):
        value.requires_grad_(trains.get(name, value.requires_grad))


def _place_others(model: nn.Module, mesh: "DeviceMesh", keep_plain: bool) -> None:
    """Give the parameters that nothing cuts the first rank's values, and without FSDP make them replicated DTensors."""
    placed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        plain_names = [name for name, value in module._parameters.items() if not isinstance(value, DTensor | None)]
        for name in plain_names:
            value = module._parameters[name]
            if id(value) not in placed and keep_plain:
                take_from_first(value, torch.device(mesh.device_type), mesh.get_group())
                placed[id(value)] = value
            elif id(value) not in placed:
                whole = distribute_tensor(value.detach(), mesh, [Replicate()])  # with the first rank's values
                placed[id(value)] = nn.Parameter(whole, requires_grad=value.requires_grad)
            module._parameters[name] = placed[id(value)]
        if plain_names and not keep_plain and not shows_local_views(module):
            LocalView(plain_names).install(module)


# -- the effect of each word of a plan: torch's styles, and further ones --------------------------------------------


class _SummedGradient(torch.autograd.Function):
    """Hands a tensor through; its gradient is the sum of those of all ranks of a group."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch_private.wait_tensor(torch_private.all_reduce(gradient.contiguous(), "sum", ctx.group)), None


class LocalView:
    """Shows a module its replicated DTensor parameters as plain tensors while its forward pass runs.

    `summed` names the group that their gradients are summed over, because each rank uses them on its part of the
    activations; None if every rank has the full gradient already.
    """

    def __init__(self, names: Iterable[str], summed: str | None = None) -> None:
        self.names = tuple(names)
        self.summed = summed
        self.kept: list[dict[str, Any]] = []  # a stack, for a module that comes by again within itself

    def enter(self, module: nn.Module, arguments: Any) -> None:
        """Put the plain tensors in; a forward pre-hook."""
        parameters = module._parameters
        self.kept.append({name: parameters[name] for name in self.names})
        for name in self.names:
            value: Any = parameters[name]
            value = value.to_local() if isinstance(value, DTensor) else value
            if self.summed is not None and value is not None and torch.is_grad_enabled():
                value = _SummedGradient.apply(value, self.summed)
            parameters[name] = value

    def leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Put the parameters back; a forward hook that also runs after an error."""
        if self.kept:
            module._parameters.update(self.kept.pop())

    def install(self, module: nn.Module) -> None:
        """Register both hooks."""
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self.leave, always_call=True)


def shows_local_views(module: nn.Module) -> bool:
    """Return whether a module computes with plain views of its parameters already."""
    return any(isinstance(getattr(hook, "__self__", None), LocalView) for hook in module._forward_pre_hooks.values())


class SummedReplica(ParallelStyle):
    """Every rank has the full module and runs it on its own part of the activations (its heads, say); gradients are summed."""

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        group = device_mesh.get_group().group_name
        for part in module.modules():
            names = [name for name, value in part._parameters.items() if value is not None]
            if names:
                LocalView(names, group).install(part)
        return module


class SplitSequence(SummedReplica):
    """The module runs on this rank's part of the sequence (dimension 1); around it every rank has all of it."""

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        lengths: list[torch.Size] = []

        def split(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            whole, *others = arguments
            lengths.append(whole.shape)
            part = DTensor.from_local(whole, device_mesh, [Replicate()], run_check=False)
            return part.redistribute(placements=[Shard(1)]).to_local(), *others

        def join(_: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
            whole = torch.Size((*lengths.pop()[:2], *output.shape[2:]))
            stride = torch.empty(whole, device="meta").stride()
            part = DTensor.from_local(output, device_mesh, [Shard(1)], run_check=False, shape=whole, stride=stride)
            return part.redistribute(placements=[Replicate()]).to_local()

        super()._apply(module, device_mesh)
        module.register_forward_pre_hook(split)
        module.register_forward_hook(join)
        return module


# The words of plans, also those of transformers, and their styles.
WORDS: dict[str, Callable[[nn.Module], ParallelStyle | None]] = {
    "colwise": lambda module: ColwiseParallel(),
    "colwise_rep": lambda module: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda module: ColwiseParallel(output_layouts=Replicate()),
    # Token numbers are never sharded, so an embedding's input is complete under any style.
    "rowwise": lambda module: RowwiseParallel(input_layouts=Replicate() if isinstance(module, nn.Embedding) else None),
    "rowwise_rep": lambda module: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda module: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda module: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda module: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": lambda module: SplitSequence(),
    "replicated_with_grad_allreduce": lambda module: SummedReplica(),
    "replicate": lambda module: None,
}


def cut_dimension(style: Any, module: nn.Module, name: str) -> int | None:
    """Return the dimension along which a style shards a parameter; None if it is unsharded or unknown."""
    if type(style) is ColwiseParallel:
        return 1 if isinstance(module, nn.Embedding) else 0
    if type(style) is RowwiseParallel and name == "weight":
        return 0 if isinstance(module, nn.Embedding) else 1
    return None


def keeps_output_cut(style: Any) -> bool:
    """Return whether a module with this style returns only this rank's part."""
    return type(style) is ColwiseParallel and any(isinstance(item, Shard) for item in style.output_layouts)
