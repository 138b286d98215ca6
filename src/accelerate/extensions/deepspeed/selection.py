"""AcceleratorState's handling of DeepSpeed plugins, of which a program may pass several by name."""

from typing import Any

from accelerate.config.enums import PrecisionType


def set_up(state: Any, plugins: Any) -> None:
    """Give the plugins of a new state its precision, and select the first unless one is selected; NotImplementedError for fp8."""
    if state._mixed_precision == PrecisionType.FP8.value:
        raise NotImplementedError("mixed_precision='fp8' is not possible with DeepSpeed here. Use 'bf16'.")
    several = isinstance(plugins, dict)
    for plugin in plugins.values() if several else [plugins]:
        plugin.set_mixed_precision(state._mixed_precision)
    if not several:
        plugins.select(_from_accelerator_state=True)
    elif not any(plugin.selected for plugin in plugins.values()):
        state.select_deepspeed_plugin(next(iter(plugins)))


def refuse_another_engine(state: Any, plugins: Any, hint: str) -> None:
    """Raise NotImplementedError where plugins ask for another engine than the one of the state."""
    asked, live = (value if isinstance(value, dict) else {"": value} for value in (plugins, state.deepspeed_plugins))
    for key, plugin in asked.items():
        contradictions = plugin.contradictions(live[key]) if key in live else [f"the key {key!r}"]
        if contradictions:
            raise NotImplementedError(
                f"deepspeed_plugins={plugin!r} was given, and asks for {', '.join(contradictions)}, but AcceleratorState has already been "
                f"initialized with {live.get(key, state.deepspeed_plugins)!r}. {hint}"
            )
