"""State dicts and optimizers of sharded models and of adapters of PEFT, as the public functions write and read them."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from accelerate.checkpoint import state as states
from accelerate.checkpoint.model_io import io_of
from accelerate.modules.unwrap import canonical_name, extract_model_from_parallel, is_peft_model


def _get_model_state_dict(model: nn.Module, adapter_only: bool = False, sd_options: Any = None) -> dict[str, Any]:
    """Return a model's state dict, or that of the active adapter of a PEFT model. With `sd_options` every rank calls it.

    `sd_options` are torch's `StateDictOptions` for gathering a sharded model; None takes this rank's tensors as they are. With
    `full_state_dict` and `cpu_offload`, ranks other than 0 get an empty dictionary.
    """
    if sd_options is None:
        state = None
    elif sd_options.full_state_dict and sd_options.cpu_offload and io_of(model).gathers_itself:
        # Torch frees what it gathered for rank 0 before it was copied, where that is host memory, and crashes.
        whole = states.gathered(io_of(model).model_state(model).values)
        state = whole if states.rank_and_size()[0] == 0 else {}
    else:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        state = get_model_state_dict(model, options=sd_options)
    if adapter_only and is_peft_model(model):
        # Gathered first: PEFT picks entries by name, and would otherwise pick this rank's shards.
        return adapter_entries(model, model.state_dict() if state is None else state) if state != {} else state
    return model.state_dict() if state is None else state


def _set_model_state_dict(
    model: nn.Module, state_dict: dict[str, Any], adapter_only: bool = False, sd_options: Any = None
) -> Any:
    """Load what `_get_model_state_dict` returned; return missing and unexpected keys.

    With `sd_options` every rank calls it.
    """
    if adapter_only and is_peft_model(model):
        from peft import set_peft_model_state_dict

        if io_of(model).gathers_itself:
            return _load_adapter(model, state_dict)
        return set_peft_model_state_dict(model, state_dict, adapter_name=model.active_adapter)
    if sd_options is not None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        return set_model_state_dict(model, state_dict, options=sd_options)
    return model.load_state_dict(state_dict)


# PEFT looks for the names of modules. In wrapped models, names of wrappers are among them.


def adapter_entries(model: nn.Module, state: Mapping[str, Any], adapter: str | None = None) -> dict[str, Any]:
    """Return an adapter's entries of a state, by the names in its file; by default the active one's. Any rank.

    Args:
        model: a model with adapters of PEFT, wrapped or not.
        state: all entries of its state dict, by the names the user wrote or those of a wrapped model.
        adapter: the adapter's name.
    """
    from peft import get_peft_model_state_dict

    inner: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    # Of a wrapper and what it wraps the latter, which comes last.
    inside = {canonical_name(name): name for name, _ in inner.named_modules()}
    steps = {name: canonical_name(name).rpartition(".") for name in state}
    state = {f"{inside.get(owner, owner)}{dot}{own}": state[name] for name, (owner, dot, own) in steps.items()}
    found = get_peft_model_state_dict(inner, state_dict=state, adapter_name=adapter or inner.active_adapter)
    return {canonical_name(name): value for name, value in found.items()}


def _load_adapter(model: nn.Module, adapter: Mapping[str, Any]) -> Any:
    """Load what `adapter_entries` returned together with the rest, where the model loads all parameters at once.

    Collective: call on every rank.
    """
    whole = model.state_dict()
    names = {id(value): name for name, value in whole.items()}
    own = adapter_entries(model, whole)
    known = {names[id(value)]: adapter[name] for name, value in own.items() if name in adapter}
    return model.load_state_dict({**whole, **known})
