"""Names of parameters as the user wrote them, without the parts that wrappers put in."""

from collections.abc import Iterable

from torch import nn

# The attribute under which each kind of wrapper keeps the module inside it, at whatever depth.
INNER_ATTRIBUTES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts that torch.compile, FSDP1 and activation checkpointing put in.

    The leading ``module.`` of DistributedDataParallel stays, because a user's own attribute may have that name.

    Args:
        name: A dotted name from ``named_parameters`` or a state dict.

    Example:
        >>> canonical_name("layers.0._orig_mod.weight")
        'layers.0.weight'
    """
    return ".".join([part for part in name.split(".") if part not in INNER_ATTRIBUTES])


def canonical_parameters(*modules: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of several modules under their canonical names.

    Args:
        *modules: Their names must not collide.

    Raises:
        ValueError: Two modules have a parameter of the same name.
    """
    found: dict[str, nn.Parameter] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            plain = canonical_name(name)
            if plain in found and found[plain] is not parameter:
                raise ValueError(f"Two parameters are called {plain!r}; pass one module at a time.")
            found[plain] = parameter
    return found


def match_names(wanted: Iterable[str], found: Iterable[str]) -> dict[str, str]:
    """Pair each found name with the wanted one that means the same parameter, whatever wrappers wrote the names.

    Equal names pair first. The others pair when they are equal without wrapper parts and without a leading
    ``module.``, provided that this is unambiguous.

    Args:
        wanted: Names that a model has.
        found: Names that a file has.

    Returns:
        Found name to wanted name; names without a partner are absent.

    Example:
        >>> match_names(["weight", "bias"], ["module._orig_mod.weight", "other"])
        {'module._orig_mod.weight': 'weight'}
    """
    wanted, found = list(wanted), list(found)
    known = set(wanted)
    pairs = {name: name for name in found if name in known}
    open_wanted: dict[str, list[str]] = {}
    for name in known.difference(pairs):
        open_wanted.setdefault(_bare(name), []).append(name)
    open_found: dict[str, list[str]] = {}
    for name in found:
        if name not in pairs:
            open_found.setdefault(_bare(name), []).append(name)
    for bare, names in open_found.items():
        partners = open_wanted.get(bare, [])
        if len(names) == len(partners) == 1:
            pairs[names[0]] = partners[0]
    return pairs


def _bare(name: str) -> str:
    return canonical_name(name).removeprefix("module.")
