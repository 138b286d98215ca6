"""Run a program as a simulated rank: python -m accelerate.extensions.simulate [-m] script [arguments ...]."""

from accelerate.extensions.simulate.simulation import main

main()
