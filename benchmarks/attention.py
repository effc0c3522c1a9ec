"""Times attention on an NVIDIA GPU beside torch's backends and others, and measures the error of each.

    python tools/build.py --backend cuda
    python benchmarks/attention.py [--only NAME ...] [--output PATH]

The shapes are the self-attentions of ten released models, few queries of many keys, cross-attentions of released
models, and prompts of language models, random normal inputs, bf16 but for the records with "dtype": "float16". A
record with "key_heads" is causal, and its queries share that many heads of keys and values. The backends take turns;
times are of the device, in ms, the median of five rounds. `ours_8bit` is precision="int8" with its quantising, for
self-attentions with heads of 128 columns. `fa4` is FlashAttention-4 (pip install flash-attn-4), and `cudnn_fp8` cuDNN
with e4m3 inputs and scales of one (pip install nvidia-cudnn-frontend); its time leaves out the cast of the inputs. A
record with "mask": "keys" leaves out the last 40 keys: `ours` by a bool mask, `ours_lengths` by key lengths,
`ours_valid` attends to the other keys alone, and `default` is torch's attention with the same mask. "mask": "addends"
adds zeros to the scores of the keys. `err` is the relative L2 error against float64 of 256 queries of two heads (of a
prompt the last ones, of two heads that share one), by kind of input: "peaked" has queries and keys of standard
deviation 2, "outliers" every 16th channel eight times as large, and "copied keys" 40 times the queries as keys.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from result_files import common_meta, kept_records, load_package, result_file, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = {  # [batch, tokens, heads, columns]
    "ltx49": (2, 2688, 32, 64),
    "ltx161": (2, 8064, 32, 64),
    "sd35": (2, 4429, 38, 64),
    "cog": (2, 17776, 48, 64),
    "ltx13b": (1, 13376, 32, 128),
    "ltx2": (1, 6144, 32, 128),
    "flux": (1, 4608, 24, 128),
    "qwen": (1, 7145, 24, 128),
    "hyvideo15": (1, 26500, 16, 128),
    "wan": (1, 32760, 40, 128),
}
CROSS = {  # [batch, queries, heads, columns], keys
    "few64": ((1, 64, 32, 64), 8192),
    "few128": ((1, 64, 32, 128), 8192),
    "few64_8": ((8, 64, 32, 64), 8192),
    "few128_8": ((8, 64, 32, 128), 8192),
    "ltx2_audio": ((1, 126, 32, 64), 6144),
    "ltx2_video": ((1, 6144, 32, 64), 126),
    "ltx2_audio_text": ((1, 126, 32, 64), 1024),
    "ltx2_text": ((1, 6144, 32, 128), 1024),
    "ltx13b_text": ((1, 13376, 32, 128), 256),
    "wan_text": ((1, 32760, 40, 128), 512),
    "wan_image": ((1, 32760, 40, 128), 257),
}
CAUSAL = {  # [batch, tokens, heads, columns], heads of key and value
    "llama_256": ((1, 256, 32, 128), 8),
    "llama_512": ((1, 512, 32, 128), 8),
    "llama_1024": ((1, 1024, 32, 128), 8),
    "llama_2048": ((1, 2048, 32, 128), 8),
    "llama": ((1, 8192, 32, 128), 8),
    "llama_512_8": ((8, 512, 32, 128), 8),
    "llama_8": ((8, 8192, 32, 128), 8),
    "llama2": ((1, 4096, 32, 128), 32),
    "falcon_512": ((1, 512, 71, 64), 1),
    "falcon": ((1, 8192, 71, 64), 1),
}
IDENTITY = ("name", "mask", "dtype")  # what a record measures
PROMPTS = (
    "ltx2_audio_text",
    "ltx2_text",
    "ltx13b_text",
)  # models that add zeros to the scores of a prompt without padding
FLOAT16 = ("ltx49", "flux")  # timed in float16 as well
ALL = [*SHAPES, *CROSS, *CAUSAL]
MASKED_KEYS = 40
MASKED = ("ltx2", "qwen", "hyvideo15")  # models with padded prompts among the keys
ROUNDS, SECONDS_PER_ROUND = 5, 0.03
CHECKED_QUERIES, CHECKED_HEADS = 256, 2

Heads = tuple[Tensor, Tensor, Tensor]


def sdpa(
    heads: Heads, mask: Tensor | None = None, backend: SDPBackend | None = None, is_causal: bool = False
) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in heads)
    options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": query.shape[1] != key.shape[1]}
    if backend is None:
        return F.scaled_dot_product_attention(query, key, value, mask, **options).transpose(1, 2)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, mask, **options).transpose(1, 2)


class CudnnFp8:
    """cuDNN's attention in e4m3 with scales of one. It casts the inputs once, and keeps them for the next calls."""

    def __init__(self) -> None:
        import cudnn

        self.cudnn = cudnn
        self.heads: Heads | None = None

    def __call__(self, heads: Heads) -> Tensor:
        if self.heads is None or any(x is not y for x, y in zip(heads, self.heads)):
            self.heads = heads
            limit = torch.finfo(torch.float8_e4m3fn).max
            self.prepare(*(x.transpose(1, 2).clamp(-limit, limit).to(torch.float8_e4m3fn) for x in heads))
        self.graph.execute(self.tensors, self.workspace, handle=self.handle)
        return self.out.transpose(1, 2)

    def prepare(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """query, key, value: [B, heads, S, D]."""
        e4m3, fp32 = self.cudnn.data_type.FP8_E4M3, self.cudnn.data_type.FLOAT
        self.handle = self.cudnn.create_handle()
        self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.graph = graph = self.cudnn.pygraph(
            io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, handle=self.handle
        )
        one = torch.ones(1, 1, 1, 1, device="cuda")
        given = dict(zip("qkv", (query, key, value)))
        given |= dict.fromkeys(("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"), one)
        inputs = {
            name: graph.tensor(name=name, dim=x.shape, stride=x.stride(), data_type=e4m3 if name in "qkv" else fp32)
            for name, x in given.items()
        }
        out, _, *largest = graph.sdpa_fp8(**inputs, attn_scale=query.shape[-1] ** -0.5, generate_stats=False)
        self.out = torch.empty_like(query)
        self.tensors = {inputs[name]: x for name, x in given.items()} | {out: self.out}
        out.set_output(True).set_dim(self.out.shape).set_stride(self.out.stride()).set_data_type(e4m3)
        for x in largest:  # of the weights and of the output
            x.set_output(True).set_dim(one.shape).set_stride(one.stride()).set_data_type(fp32)
            self.tensors[x] = torch.empty_like(one)
        graph.build([self.cudnn.heur_mode.A])
        self.workspace = torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)


def backends(ltx: ModuleType, is_causal: bool = False) -> dict[str, Callable[[Heads], Tensor]]:
    """Attention without a mask, by column of the tables."""
    found: dict[str, Callable[[Heads], Tensor]] = {
        "ours": lambda heads: ltx.attention(*heads, is_causal=is_causal),
        "cudnn": lambda heads: sdpa(heads, backend=SDPBackend.CUDNN_ATTENTION, is_causal=is_causal),
        "flash2": lambda heads: sdpa(heads, backend=SDPBackend.FLASH_ATTENTION, is_causal=is_causal),
    }
    if importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"):
        from flash_attn.cute import flash_attn_func

        found["fa4"] = lambda heads: flash_attn_func(*heads, causal=is_causal)[0]
    return found


def backends_in_8_bits(ltx: ModuleType, columns: int) -> dict[str, Callable[[Heads], Tensor]]:
    found: dict[str, Callable[[Heads], Tensor]] = {}
    if columns == 128:
        found["ours_8bit"] = lambda heads: ltx.attention(*heads, precision="int8")
    if importlib.util.find_spec("cudnn"):
        found["cudnn_fp8"] = CudnnFp8()
    return found


def milliseconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Of each call, as often in a row as the clocks need to settle."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            count = max(1, round(SECONDS_PER_ROUND * 1e3 / times[name][0])) if turn else 1
            for _ in range(count):  # the first turn compiles or allocates
                call()
            start.record()
            for _ in range(count):
                call()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / count)
    return {name: round(statistics.median(samples[1:]), 4) for name, samples in times.items()}


def inputs(
    shape: tuple[int, int, int, int],
    keys: int,
    kind: str = "normal",
    dtype: torch.dtype = torch.bfloat16,
    key_heads: int | None = None,
) -> Heads:
    batch, tokens, heads, columns = shape
    key_heads = key_heads or heads
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(length: int, heads: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(batch, length, heads, columns, device="cuda", generator=generator)
        return (scale * x).to(dtype)

    spread = 2.0 if kind == "peaked" else 1.0
    query, key, value = normal(tokens, heads, spread), normal(keys, key_heads, spread), normal(keys, key_heads)
    if kind == "outliers":
        for x in (query, key, value):
            x[..., ::16] *= 8
    if kind == "copied keys":
        key[:, :tokens] = 40 * query[:, :, :key_heads]
    return query, key, value


def errors(
    found: dict[str, Callable[[Heads], Tensor]], tokens: int, columns: int, is_causal: bool = False
) -> dict[str, dict[str, float]]:
    result = {}
    checked = slice(-CHECKED_QUERIES, None) if is_causal else slice(CHECKED_QUERIES)
    for kind in ("normal", "peaked", "outliers", "copied keys"):
        shape = (1, tokens, CHECKED_HEADS, columns)
        query, key, value = heads = inputs(shape, tokens, kind, key_heads=1 if is_causal else None)
        scores = query[:, checked].double().transpose(1, 2) @ key.double().permute(0, 2, 3, 1) * columns**-0.5
        if is_causal:
            places = torch.arange(tokens, device="cuda")
            scores.masked_fill_(places > places[checked, None], -math.inf)
        exact = (scores.softmax(-1) @ value.double().transpose(1, 2)).transpose(1, 2)
        differences = {name: call(heads)[:, checked].double() - exact for name, call in found.items()}
        result[kind] = {name: float(f"{x.norm() / exact.norm():.4g}") for name, x in differences.items()}
    return result


def masked(ltx: ModuleType, heads: Heads) -> dict[str, Callable[[], Tensor]]:
    query, key, value = heads
    valid = key.shape[1] - MASKED_KEYS
    mask = (torch.arange(key.shape[1], device="cuda") < valid).expand(key.shape[0], -1).contiguous()
    lengths = mask.sum(-1, dtype=torch.int32)
    kept = (query, key[:, :valid], value[:, :valid])
    return {
        "ours": lambda: ltx.attention(*heads, mask=mask),
        "ours_lengths": lambda: ltx.attention(*heads, key_lengths=lengths),
        "ours_valid": lambda: ltx.attention(*kept),
        "default": lambda: sdpa(heads, mask[:, None, None]),
    }


def cross(ltx: ModuleType, name: str, found: dict[str, Callable[[Heads], Tensor]]) -> list[dict[str, Any]]:
    shape, keys = CROSS[name]
    heads = inputs(shape, keys)
    ms = milliseconds({column: lambda call=call: call(heads) for column, call in found.items()})  # type: ignore[misc]
    records = [{"name": name, "shape": list(shape), "keys": keys, "mask": None, "ms": ms}]
    if name in PROMPTS:
        zeros = torch.zeros(shape[0], keys, device="cuda", dtype=torch.bfloat16)
        ms = milliseconds(
            {
                "ours": lambda: ltx.attention(*heads, mask=zeros),
                "default": lambda: sdpa(heads, zeros[:, None, None]),
            }
        )
        records.append({"name": name, "shape": list(shape), "keys": keys, "mask": "addends", "ms": ms})
    return records


def causal(ltx: ModuleType, name: str) -> dict[str, Any]:
    shape, key_heads = CAUSAL[name]
    batch, tokens, count, columns = shape
    found = backends(ltx, is_causal=True)
    heads = inputs(shape, tokens, key_heads=key_heads)
    ms = milliseconds({column: lambda call=call: call(heads) for column, call in found.items()})  # type: ignore[misc]
    flop = 4 * batch * count * tokens * (tokens + 1) // 2 * columns
    return {
        "name": name,
        "shape": list(shape),
        "key_heads": key_heads,
        "mask": "causal",
        "ms": ms,
        "tflops": {column: round(flop / x / 1e9) for column, x in ms.items()},
        "err": errors(found, tokens, columns, is_causal=True),
    }


def measure(ltx: ModuleType, name: str) -> list[dict[str, Any]]:
    if name in CROSS:
        return cross(ltx, name, backends(ltx))
    if name in CAUSAL:
        return [causal(ltx, name)]
    shape = SHAPES[name]
    batch, tokens, count, columns = shape
    found = backends(ltx) | backends_in_8_bits(ltx, columns)
    heads = inputs(shape, tokens)
    ms = milliseconds({column: lambda call=call: call(heads) for column, call in found.items()})  # type: ignore[misc]
    flop = 4 * batch * count * tokens * tokens * columns
    record: dict[str, Any] = {"name": name, "shape": list(shape), "mask": None, "ms": ms}
    record["tflops"] = {column: round(flop / x / 1e9) for column, x in ms.items()}
    record["err"] = errors(found, tokens, columns)
    records = [record]
    if name in FLOAT16:
        half = inputs(shape, tokens, dtype=torch.float16)
        ms = milliseconds({column: lambda call=call: call(half) for column, call in backends(ltx).items()})  # type: ignore[misc]
        records.append({"name": name, "shape": list(shape), "mask": None, "dtype": "float16", "ms": ms})
    if name in MASKED:
        records.append({"name": name, "shape": list(shape), "mask": "keys", "ms": milliseconds(masked(ltx, heads))})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=ALL, default=ALL, help="these shapes; the file keeps the others"
    )
    parser.add_argument("--output", type=Path, help="JSON (default: benchmarks/results/<gpu>-attention.json)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/attention.py needs an NVIDIA GPU")
    ltx, package = load_package()
    meta = {
        **common_meta(package, "cuda"),
    }
    output = options.output or result_file("attention")
    records: list[dict[str, Any]] = []
    with torch.no_grad():
        for name in options.only:
            for record in measure(ltx, name):
                records.append(record)
                print(
                    name,
                    record["mask"] or "",
                    record["ms"],
                    record.get("tflops", ""),
                    record.get("err", ""),
                    flush=True,
                )
            write(output, meta, kept_records(output, meta, records, IDENTITY))
    print(output)


if __name__ == "__main__":
    main()
