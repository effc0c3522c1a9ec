"""What tests of trainers share."""

from __future__ import annotations

from accelerate.state import AcceleratorState, GradientState


def forget_accelerator() -> None:
    """accelerate keeps the settings of an Accelerator for all of the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
