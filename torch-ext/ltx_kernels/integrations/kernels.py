"""The layers as a mapping of the kernels library, of which nothing is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from .. import layers
from .._fakes import COMPILED_DEVICE


@dataclass(frozen=True)
class LoadedLayer:
    """What the kernels library calls a repository: here the layer is loaded already."""

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer


# By the names that transformers decorates its modules with. What these do is the same in each of them, but for where
# they round.
LAYERS: Mapping[str, type[nn.Module]] = {
    "RMSNorm": layers.RMSNorm,
    "GeLU": layers.GeLU,
    "GeluTanh": layers.GeluTanh,
    "NewGELU": layers.GeluTanh,
    "FastGELU": layers.GeluTanh,
}


def kernel_mapping() -> dict[str, dict[str, LoadedLayer]]:
    """The layers of this build, by the names of the modules that they fit, as the kernels library takes them.

    To put them into a model::

        with kernels.use_kernel_mapping(ltx.kernel_mapping(), inherit_mapping=False):
            kernels.kernelize(model, mode=kernels.Mode.INFERENCE)

    The layers have gradients and compile, so they serve every mode. Unlike `optimize`, ``kernelize`` replaces a forward
    whatever a later call brings, keeps no report, has no ``restore``, and takes away what `optimize` has put there.

    Returns:
        {name: {device: repository}}, with the device that this build has kernels for.
    """
    return {name: {COMPILED_DEVICE or "cpu": LoadedLayer(layer)} for name, layer in LAYERS.items()}
