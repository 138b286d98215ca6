"""From resolved settings to the environment of a worker."""

from collections.abc import Mapping

from accelerate.config.options import BY_NAME, FEATURES, OPTIONS, of_feature
from accelerate.launch.plan import LaunchPlan, Resolved

SettingsLike = Mapping[str, Resolved]


def worker_environment(plan: LaunchPlan, base: Mapping[str, str]) -> dict[str, str]:
    """Return the full environment of the processes of a plan.

    Args:
        plan: what is started.
        base: the environment they inherit.
    """
    environment = {**base, **exports(plan.settings), **plan.extra}
    selected = plan["gpu_ids"]
    if selected not in (None, "all") and plan.hardware.visible_env and not plan.on_cpu:
        environment[plan.hardware.visible_env] = ",".join(part.strip() for part in str(selected).split(","))
    return environment


def exports(settings: SettingsLike) -> dict[str, str]:
    """Return the variables that carry settings to a worker.

    Options of features that are off are left out.

    Args:
        settings: option name to resolved value.

    Example:
        >>> from accelerate.commands.launch import launch_command_parser
        >>> from accelerate.launch.resolve import resolve
        >>> plan = resolve(launch_command_parser().parse_args(["--mixed_precision", "bf16", "-m", "timeit"]))
        >>> exports(plan.settings)["ACCELERATE_MIXED_PRECISION"]
        'bf16'
    """
    on = {name for name, feature in FEATURES.items() if feature.is_on(settings[feature.switch].value)}
    variables: dict[str, str] = {}
    for option in OPTIONS:
        if option.feature is None or option.feature in on:
            variables.update(_encode(option.name, settings))
    return variables


def feature_exports(feature: str, settings: SettingsLike) -> dict[str, str]:
    """Return the variables of the options that only one feature reads, whether or not it is on.

    Args:
        feature: a key of `accelerate.config.options.FEATURES`.
        settings: option name to resolved value.
    """
    variables: dict[str, str] = {}
    for option in of_feature(feature):
        variables.update(_encode(option.name, settings))
    return variables


def _encode(name: str, settings: SettingsLike) -> dict[str, str]:
    option = BY_NAME[name]
    value = settings[name].value
    if option.above_one is not None and (settings[option.above_one].value or 1) <= 1:
        return {}
    return option.encode(value)
