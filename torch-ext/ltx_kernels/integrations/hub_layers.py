"""The layers as a mapping of the kernels library, of which nothing is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from .. import layers
from .._checks import ROUNDING, choice
from .._variant import COMPILED_DEVICE


@dataclass(frozen=True)
class LoadedLayer:
    """What the kernels library calls a repository: here the layer is loaded already."""

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer


# By the names that transformers decorates its modules and functions with. What these do is the same in each of them,
# but for where they round.
LAYERS: Mapping[str, type[nn.Module]] = {
    "RMSNorm": layers.RMSNorm,
    "RMSNormZeroCentered": layers.RMSNormZeroCentered,
    "RMSNormGated": layers.RMSNormGated,
    "rotary_pos_emb": layers.RotaryPosEmb,
    "SiLU": layers.SiLU,
    "GeLU": layers.GeLU,
    "GeluTanh": layers.GeluTanh,
    "NewGELU": layers.GeluTanh,
    "FastGELU": layers.GeluTanh,
    "QuickGELU": layers.QuickGELU,
}
# Those that round where transformers' modules do, if asked to.
EAGER_LAYERS: Mapping[str, type[nn.Module]] = {
    "RMSNorm": layers.RMSNormEager,
    "rotary_pos_emb": layers.RotaryPosEmbEager,
}


def kernel_mapping(*, rounding: str = "fp32") -> dict[str, dict[str, LoadedLayer]]:
    """The layers of this build, by the names of the modules that they fit, as the kernels library takes them.

    To put them into a model::

        with kernels.use_kernel_mapping(ltx.kernel_mapping(), inherit_mapping=False):
            kernels.kernelize(model, mode=kernels.Mode.INFERENCE)

    The layers have gradients and compile, so they serve every mode. Unlike `optimize`, ``kernelize`` replaces a forward
    whatever a later call brings, keeps no report, has no ``restore``, and takes away what `optimize` has put there. It
    replaces a function, as the rotary embedding is, for every model of the process that calls it.

    Args:
        rounding: "fp32" rounds once. "eager" takes the norm and the rotary embedding that round where LlamaRMSNorm and
            LlamaAttention do; the other layers are the same.

    Returns:
        {name: {device: repository}}, with the device that this build has kernels for.

    Raises:
        ValueError: An unknown ``rounding``.
    """
    choice("rounding", ROUNDING, rounding)
    chosen = {**LAYERS, **EAGER_LAYERS} if rounding == "eager" else LAYERS
    return {name: {COMPILED_DEVICE or "cpu": LoadedLayer(layer)} for name, layer in chosen.items()}
