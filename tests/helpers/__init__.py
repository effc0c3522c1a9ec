"""What every op test needs: cases, fp64 truth with its error bound, guarded memory, readable mismatches."""

from .cases import (
    ACTIVATIONS,
    DTYPES,
    MODULATORS,
    NORM_OPS,
    TABLES,
    Case,
    Make,
    activation_case,
    angle_table,
    gate_and_up,
    modulator_shape,
    norm_case,
    qk_norm_rope_case,
    rope_case,
    rotary_case,
)
from .check import check, check_eager, check_out
from .memory import LAYOUTS, Guarded, Layout, guarded_output, place, torch_threads, unchanged
from .numeric import assert_close_to_eager, assert_close_to_fp64, assert_same_bits, ulp

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "LAYOUTS",
    "MODULATORS",
    "NORM_OPS",
    "TABLES",
    "Case",
    "Guarded",
    "Layout",
    "Make",
    "activation_case",
    "angle_table",
    "assert_close_to_eager",
    "assert_close_to_fp64",
    "assert_same_bits",
    "check",
    "check_eager",
    "check_out",
    "gate_and_up",
    "guarded_output",
    "modulator_shape",
    "norm_case",
    "place",
    "qk_norm_rope_case",
    "rope_case",
    "rotary_case",
    "torch_threads",
    "ulp",
    "unchanged",
]
