"""The time of a step, manually: arithmetic at a part of the peak rate, exchanges that are waited for, and those that are hidden."""

import pytest

from accelerate.extensions.reports import device_specs
from accelerate.extensions.reports.estimator import Fleet, Transfer, step_time

H100 = device_specs.device_spec("h100-80gb")
FLEET = Fleet(H100, 8, device_specs.link("infiniband-ndr"), efficiency=0.5, overlap=0.7)


def test_arithmetic_takes_the_rate_of_its_precision():
    flops = {"bf16": 989e12, "no": 67e12}
    assert FLEET.computing(flops) == pytest.approx(2 * (1 + 1)) and FLEET.computing({"fp8": 67e12}) == pytest.approx(2)


@pytest.mark.parametrize("collective, rounds", [("all_gather", 1), ("all_reduce", 2)])
def test_exchanges_within_layers_are_waited_for_and_others_hide(collective, rounds):
    within = Transfer("tp", collective, 8, 1, 450 * 10**9)  # NVLink sends 450 GB/s
    between = Transfer("dp", collective, 2, 8, 50 * 10**9)  # a card sends 50 GB/s
    time = step_time(0.2, [within, between], FLEET)
    assert time.waiting == pytest.approx(rounds * 7 / 8) and time.exposed == pytest.approx(rounds / 2 - 0.14)
    assert time.total == pytest.approx(0.2 + time.waiting + time.exposed)
    assert step_time(10.0, [within, between], FLEET, offloaded=6.0).exposed == 0
