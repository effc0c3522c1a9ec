"""One process with one LTX_KERNELS_FORCE: checks calls against fp64 and writes their outputs, or the error, to a file.

python tests/helpers/forced.py norm outputs.pt [PART ...]     # only calls with one of these in their name
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from helpers import (
    ACTIVATIONS,
    CLAMPED,
    DTYPES,
    MASKS,
    MODEL_INDEX,
    MODULATORS,
    NORM_OPS,
    QUANTISED_NORMS,
    Case,
    Make,
    activation_case,
    attention_case,
    check,
    fp32_parameters_case,
    gate_heads_case,
    model_index_case,
    norm_case,
    qk_norm_rope_case,
    rope_case,
    rotary_case,
)
from helpers.build import REPO_ID

# Rows of a part of a warp, a warp, several, as many as one block takes, and of several blocks: see geometry() in
# kernel_src/norm.cu.
NORM_WIDTHS = [8, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 40000, 131072]
GLU_WIDTHS = [8, 64, 1024, 4096, 8192]
ATTENTION_KEYS = [1, 7, 64, 77, 127, 128, 129, 256, 300, 512]  # less than a chunk of 128, one, and several
HEADS = [(3, 64), (32, 64), (24, 128), (2, 256), (5, 16)]


def cases(family: str, device: str) -> dict[str, Case]:
    """Calls that every kernel of a family can run: contiguous, aligned, whole packs."""
    found = {}
    for dtype in DTYPES:
        make = Make(device, dtype)
        if family == "norm":
            for op in NORM_OPS:
                tables = [name for name in MODULATORS if name in NORM_OPS[op]]
                for width in NORM_WIDTHS:
                    found[f"{op} {dtype} {width}"] = norm_case(op, make, (2, 5, width), tables=tables)
                    wide = norm_case(op, make, (2, 5, width), param_dtype=torch.float32, modulation_dtype=torch.float32)
                    found[f"{op} {dtype} {width} fp32"] = wide
                    if dtype == torch.bfloat16:
                        found[f"{op} {width} fp32 parameters"] = fp32_parameters_case(op, make, (2, 5, width))
            if dtype == torch.bfloat16:
                found |= {f"{op} by index": model_index_case(op, make) for op in MODEL_INDEX}
        elif family == "glu":
            for name in (*ACTIVATIONS, *CLAMPED):
                for width in GLU_WIDTHS:
                    found[f"{name} {dtype} {width}"] = activation_case(name, make, (7, width))
            for heads, width in HEADS:
                for per_head in (True, False):
                    case = gate_heads_case(make, (2, 7, heads, width), per_head=per_head, scale=2.0)
                    found[f"gate_heads {per_head} {dtype} {heads}x{width}"] = case
        elif family == "quant":
            for op in ("rmsnorm", "rmsnorm_residual", "gated_residual_adaln_rmsnorm"):
                for width in NORM_WIDTHS:
                    found[f"{op} {dtype} {width}"] = norm_case(op, make, (2, 5, width))
            for width in [*NORM_WIDTHS, 1536, 3072, 5120]:
                modulated = norm_case("adaln_rmsnorm", make, (2, 5, width), without=["weight"])
                found[f"adaln_rmsnorm {dtype} {width}"] = modulated
                tables = norm_case("adaln_rmsnorm", make, (2, 5, width), without=["weight"], tables=["scale", "shift"])
                found[f"adaln_rmsnorm {dtype} {width} tables"] = tables
            if dtype == torch.bfloat16:
                for op in ("adaln_layernorm", "gated_residual_adaln_layernorm", "layernorm"):
                    for width in (1536, 3072, 5120):
                        found[f"{op} {width} fp32 parameters"] = fp32_parameters_case(op, make, (2, 5, width))
                ops = [op for op in MODEL_INDEX if op in QUANTISED_NORMS and op != "gated_residual"]
                found |= {f"{op} by index": model_index_case(op, make) for op in ops}
                found["adaln_rmsnorm 3584 by index"] = model_index_case("adaln_rmsnorm", make, 3584)
            for heads, width in HEADS:
                for per_head in (True, False):
                    case = gate_heads_case(make, (2, 7, heads, width), per_head=per_head, scale=2.0)
                    found[f"gate_heads {per_head} {dtype} {heads}x{width}"] = case
            for name in ("swiglu", "geglu erf, gate last", "gelu tanh, bias"):
                for width in [*GLU_WIDTHS, 18432, 28672]:
                    found[f"{name} {dtype} {width}"] = activation_case(name, make, (7, width))
        elif family == "attention":
            for heads, width in ((3, 64), (2, 128)):
                for keys in ATTENTION_KEYS:
                    mask = MASKS[keys % len(MASKS)]
                    case = attention_case(make, (2, 70, heads, width), keys, mask=mask, packed=True)
                    found[f"{dtype} {heads}x{width} {keys} {mask}"] = case
        else:
            for heads, width in HEADS:
                for layout in ("interleaved", "half"):
                    key = f"{dtype} {heads}x{width} {layout}"
                    sizes = (2, 7, heads, width)
                    found[f"rotary {key}"] = rotary_case(make, sizes, layout=layout, key=(5, 2))
                    found[f"rope_3d {key}"] = rope_case(make, (2, heads, width), grid=(1, 7, 1), layout=layout)
                    for across in (True, False):
                        for norm in ("rms", "layer"):
                            options = {"norm": norm, "biases": norm == "layer", "weight_offset": 1.0}
                            case = qk_norm_rope_case(make, sizes, across_heads=across, layout=layout, **options)
                            found[f"qk_norm_rope {across} {norm} {key}"] = case
                    for table, table_dtype, weight_dtype in (
                        ("[1, H, S, D/2]", torch.float32, dtype),
                        ("[B, S, H*D]", dtype, dtype),
                        ("[1, S, D/2]", dtype, torch.float32),
                    ):
                        options = {"table": table, "table_dtype": table_dtype, "weight_dtype": weight_dtype}
                        case = qk_norm_rope_case(make, sizes, across_heads=False, layout=layout, **options)
                        found[f"qk_norm_rope {table} {key}"] = case
    return found


def main() -> None:
    from kernels import get_kernel
    from test_quant import check as check_quantised

    family, path, *parts = sys.argv[1:]
    ltx = get_kernel(REPO_ID, version=1)
    results: dict[str, list[torch.Tensor] | str] = {}
    for key, case in cases(family, "cuda" if torch.cuda.is_available() else "cpu").items():
        if parts and not any(part in key for part in parts):
            continue
        try:
            outputs = check_quantised(ltx, case) if family == "quant" else check(ltx, case)
            results[key] = [output.view(torch.uint8).cpu() for output in outputs]
        except RuntimeError as error:
            if "LTX_KERNELS_FORCE" not in str(error):
                raise
            results[key] = str(error)
    torch.save(results, path)


if __name__ == "__main__":
    main()
