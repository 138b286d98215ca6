"""Parts of a new model that a prepared one has already."""

from torch import nn

from accelerate.training.prepared import PreparedObjects


def shared_part(registry: PreparedObjects, model: nn.Module) -> str | None:
    """Return which part a new model shares with one that is prepared already; None when it shares none."""
    itself = registry.find(model)
    models = [outer for outer in registry.alive("model") if itself is None or outer is not itself.outer()]
    if not models:
        return None
    # What has no parameters (an activation, a dropout) shares nothing that is trained.
    owners = {id(module) for module in model.modules() if next(module.parameters(), None) is not None}
    for name, module in model.named_modules():
        if name and id(module) in owners and (entry := registry.find(module)) is not None and entry.kind == "model":
            return f"its submodule {name!r} ({type(module).__name__}) is a prepared model"
    for prepared in models:
        for name, module in prepared.named_modules():
            if id(module) in owners:
                return f"it shares {name!r} ({type(module).__name__}) with the prepared {type(prepared).__name__}"
        # Tied weights: one parameter in two modules.
        trained = {id(parameter) for parameter in prepared.parameters() if parameter.requires_grad}
        for name, parameter in model.named_parameters():
            if id(parameter) in trained:
                return f"it shares the parameter {name!r} with the prepared {type(prepared).__name__}"
    return None
