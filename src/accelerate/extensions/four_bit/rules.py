"""Precision by the names of modules: which policy of `fully_shard` holds where, as the FSDP plugin's `module_precision` says."""

import difflib
import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

from accelerate.modules.unwrap import canonical_name
from accelerate.precision.master import short
from accelerate.runtime import torch_private


@dataclass(eq=False)
class Rule:
    """One pattern of module names.

    Attributes:
        policy: The `MixedPrecisionPolicy` of modules that match.
        modules: The outermost matching modules, with their names; "" is the model.
    """

    pattern: str
    policy: Any
    modules: dict[nn.Module, str] = field(default_factory=dict)

    def in_words(self) -> str:
        """Return its dtypes, for reading."""
        kinds = (("", "param_dtype"), ("reduced in ", "reduce_dtype"), ("outputs ", "output_dtype"))
        dtypes = [(words, getattr(self.policy, name)) for words, name in kinds]
        return ", ".join(words + short(dtype) for words, dtype in dtypes if dtype is not None) or "as stored"


def resolve(model: nn.Module, patterns: Mapping[str, Any], around: Any) -> dict[nn.Module, Rule]:
    """Return the rule of each module; the keys of `Rule.modules` must be sharded separately.

    `around` is the policy of the rest of the model. ValueError: a pattern has no effect on any module.

    Not a collective.
    """
    stored = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), None)
    word = partial(type(around), output_dtype=around.param_dtype or stored)
    rules = [
        Rule(pattern, word(value, value) if isinstance(value, torch.dtype) else value)
        for pattern, value in patterns.items()
    ]
    rule_of: dict[nn.Module, Rule] = {}
    for name, module, rule, outer in _walk(model, "", rules, None, None) if rules else ():
        if rule is not None and module not in rule_of:
            rule_of[module] = rule
            if rule is not outer:
                rule.modules[module] = name
    if unused := [rule.pattern for rule in rules if rule not in rule_of.values()]:
        names = [canonical_name(name) for name, _ in model.named_modules()]
        last = {name.rpartition(".")[2]: name for name in reversed(names)}
        near = difflib.get_close_matches(unused[0].rpartition(".")[2].replace("*", ""), last, 5)
        raise ValueError(
            f"module_precision has the pattern {unused[0]!r}, which holds for no module of {type(model).__name__}: none has such a name, or an "
            f"earlier pattern holds. Correct it; near names: {', '.join(last[word] for word in near) or 'none'}."
        )
    return rule_of


def _walk(
    module: nn.Module, name: str, rules: list[Rule], inherited: Rule | None, around: Rule | None
) -> Iterator[tuple[str, nn.Module, Rule | None, Rule | None]]:
    """Yield modules with their names, the rule of each, and that of the module around it; a container passes its own on."""
    plain = canonical_name(name)
    rule = next((rule for rule in rules if fnmatch.fnmatchcase(plain, rule.pattern)), inherited)
    # A container's forward is not called, and what recomputes activations is around the module of that name.
    called = type(module).forward is not nn.Module.forward and not isinstance(module, torch_private.ActivationWrapper)
    if called:
        yield plain, module, rule, around
    for key, child in module.named_children():
        yield from _walk(child, f"{name}.{key}" if name else key, rules, rule, rule if called else around)


def install(model: nn.Module, rules: Collection[Rule], device_type: str) -> None:
    """Let modules compute in the dtypes of their rules, whatever autocast is around them, and keep the rules for the report."""
    for part in [part for rule in rules for part in rule.modules if part is not model and rule.policy.param_dtype]:
        forward = part.forward
        part.forward = update_wrapper(partial(_without_autocast, device_type, forward), forward)
    model._accelerate_rules = rules  # type: ignore[assignment]


def _without_autocast(device_type: str, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device_type, enabled=False):
        return forward(*args, **kwargs)
