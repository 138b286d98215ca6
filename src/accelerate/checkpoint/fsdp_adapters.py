"""PEFT's adapters in models that FSDP1 wraps: PEFT looks for the names of modules, and FSDP1's own are among them."""

import itertools
from collections.abc import Mapping
from typing import Any

from torch import nn

from accelerate.modules.named import canonical_name
from accelerate.modules.unwrap import extract_model_from_parallel


def entries(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the active adapter, by the names that the user wrote. Any rank, alone.

    Args:
        model: a FullyShardedDataParallel around a PEFT model.
        state: its state dict.
    """
    from peft import get_peft_model_state_dict

    inner = extract_model_from_parallel(model)
    named = itertools.chain(inner.named_parameters(), inner.named_buffers())
    inside = {canonical_name(name): name for name, _ in named}
    state = {inside.get(canonical_name(name), name): value for name, value in state.items()}
    found = get_peft_model_state_dict(inner, state_dict=state, adapter_name=inner.active_adapter)
    return {canonical_name(name): value for name, value in found.items()}


def load(model: nn.Module, adapter: Mapping[str, Any]) -> Any:
    """Load an adapter together with the rest of the model as it is, because FSDP1 loads all of its parameters. All ranks.

    Args:
        model: a FullyShardedDataParallel around a PEFT model.
        adapter: what `entries` returned, or its like.

    Returns:
        Missing and unexpected keys.
    """
    whole = model.state_dict()
    names = {id(value): name for name, value in whole.items()}
    own = entries(model, whole)
    known = {names[id(value)]: adapter[name] for name, value in own.items() if name in adapter}
    return model.load_state_dict({**whole, **known})
