"""4-bit weights, optimizer states of few bits, Muon on shards, and precision by the names of modules."""

from accelerate.extension import Spec

SPEC = Spec(
    "four_bit",
    extension="accelerate.extensions.four_bit.extension:FewBits",
    attaches=lambda run: run.is_fsdp2,
    late=False,
    arrives=lambda models: True,
    needs="bitsandbytes",
    tensor_kinds=(
        "accelerate.extensions.four_bit.four_bit:PackedWeights",
        "accelerate.extensions.four_bit.low_bit:LowBitStates",
    ),
)
