"""The actions of 4-bit weights, Muon and rules of precision at `prepare`."""

from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from accelerate.extension import Extension
from accelerate.extensions.four_bit import four_bit, rules


class FewBits(Extension):
    """Keeps 4-bit weights as they are in training and in shards; shares Muon's work; applies `module_precision`."""

    order = 50

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self._rules: WeakKeyDictionary[nn.Module, list[rules.Rule]] = WeakKeyDictionary()

    def convert(self, model: Any, evaluation: bool) -> Any:
        """Keep 4-bit layers as they are through evaluations."""
        if not evaluation:
            four_bit.keep_unpacked(model)
        return model

    def convert_optimizer(self, optimizer: Any) -> None:
        """Let torch's Muon share its work among the ranks that have shards."""
        if self.run.is_fsdp2 and type(optimizer) is getattr(torch.optim, "Muon", None):
            from accelerate.extensions.four_bit import muon  # older torch has no Muon

            muon.share(optimizer)

    def sharding(self, model: Any, ignored: Collection[Any], policies: dict[Any, Any], units: set[Any]) -> None:
        """Refuse quantised weights that shards would lose; choose precisions by the names of modules."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plugin = self.run.state.fsdp_plugin
        four_bit.require_shardable(model, ignored, getattr(plugin.mixed_precision_policy, "param_dtype", None))
        if plugin.module_precision:
            around = plugin.mixed_precision_policy or MixedPrecisionPolicy()
            rule_of = rules.resolve(model, plugin.module_precision, around)
            policies |= {module: rule.policy for module, rule in rule_of.items()}
            units |= {module for module, rule in rule_of.items() if module in rule.modules}
            self._rules[model] = list(dict.fromkeys(rule_of.values()))

    def sharded(self, model: Any) -> None:
        """Let modules compute in the precision of their rules, and give scales to shards of 4-bit weights."""
        if model in self._rules:
            rules.install(model, self._rules[model], self.run.device.type)
        four_bit.attach(model)
