"""`accelerate estimate-memory`: the public path of `accelerate.extensions.plan.estimate`, which looks `verify_on_hub` up here."""

from accelerate.base._lazy import front

_HOMES = {
    "accelerate.extensions.plan.estimate": (
        "HubError add_timm_hub_prefix check_has_model create_ascii_table create_empty_model estimate_command "
        "estimate_command_parser estimate_training_usage gather_data main training verify_on_hub"
    )
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])

if __name__ == "__main__":
    __getattr__("main")()
