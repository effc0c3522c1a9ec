#!/usr/bin/env python3
"""The minimal integration: this package's ops in an LTX-Video pipeline, with one call.

    python examples/inject_ltx.py [MODEL]

MODEL is tiny (the default), random, a folder, or a Hub id such as Lightricks/LTX-Video.

It prints the report, with the calls that ran the ops, and what `restore` leaves. For the tiny model:

    ltx-kernels: LTXPipeline, level block, precision native, attention native, rounding fp32
    modules  class                               calls  traced  stock calls  ops
          1  diffusers.LTXVideoEncoder3d             0       0            0  channel_norm, channel_norm_residual, pixel_shuffle_3d, unpatchify, upsample_nearest
          1  diffusers.LTXVideoDecoder3d             1       0            0  channel_norm, channel_norm_residual, pixel_shuffle_3d, unpatchify, upsample_nearest
          2  transformers.T5Block                    4       0            0  rmsnorm, rmsnorm_residual
          5  transformers.T5LayerNorm                2       0            0  rmsnorm
          1  diffusers.LTXVideoRotaryPosEmbed        4       0            0
          3  diffusers.LTXVideoTransformerBlock     12       0            0  adaln_rmsnorm, gated_residual, gated_residual_adaln_rmsnorm
          6  diffusers.RMSNorm                       0       0            0  rmsnorm
          6  diffusers.LTXAttention                 24       0            0  qk_norm_rope, rmsnorm
         12  torch.RMSNorm                           0       0            0  rmsnorm
          3  diffusers.GELU                         12       0            0  gelu
          1  torch.LayerNorm                         4       0            0  layernorm
    recorded calls: 2 of 2 transformers.T5Block
    recorded calls: 3 of 3 diffusers.LTXVideoTransformerBlock
    25 frames of 128x192; modules still replaced after restore: 0
"""  # noqa: E501

import argparse

from command_line import load_kernels, start

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default="tiny")
if __name__ == "__main__":
    start(parser)

# ruff: noqa: E402
import torch
from ltx_pipeline import load_pipeline, quiet


def main() -> None:
    model = parser.parse_args().model
    quiet()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ltx = load_kernels(device)  # get_kernel("org/ltx-kernels", version=1), or `import ltx_fused as ltx` after pip
    pipe = load_pipeline(model, device, torch.bfloat16)

    report = ltx.optimize(pipe)
    video = pipe("A red kite over a beach", num_frames=25, height=128, width=192, num_inference_steps=4).frames[0]
    print(report)
    ltx.restore(pipe)
    parts = pipe.text_encoder, pipe.transformer, pipe.vae
    left = sum(hasattr(module, "_ltx_kernels") for part in parts for module in part.modules())
    print(f"{len(video)} frames of {video[0].height}x{video[0].width}; modules still replaced after restore: {left}")


if __name__ == "__main__":
    main()
