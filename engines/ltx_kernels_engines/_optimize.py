"""What every engine's plug-in does with a loaded pipeline: refuse, optimize, log the report."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

OPTIONS = "LTX_KERNELS_OPTIMIZE"
REPOSITORY = "LTX_KERNELS_REPO"


def optimize(
    pipe: Any, engine: str, refused: Mapping[str, object], own_attention: str, default_attention: str | None = None
) -> None:
    """Puts the package's ops into a pipeline that an engine has loaded, with the options of the environment.

    An error leaves the pipeline stock and is raised, so that the server does not start. The report is logged, and stays
    as ``pipe._ltx_report``.

    Args:
        pipe: A pipeline of diffusers on its device.
        engine: The name of the engine's logger, which the engine has set up to be shown.
        refused: The engine's flags that do not go with `optimize`, each with its value; one that is set is an error.
        own_attention: What to tell the engine so that this package's attention runs.
        default_attention: The backend of attention that the engine sets where its user asks for diffusers' default.
            This package's attention steps aside for any backend that is set, so this one is reset.

    Raises:
        RuntimeError: A refused flag is set, or there is no build of ltx-kernels.
        ValueError: The environment variable holds no JSON object, or `optimize` does not accept a value of it.
        TypeError: `optimize` has no such argument.
    """
    options = _options()
    if options is None:
        return
    log = logging.getLogger(f"{engine}.ltx_kernels")
    for flag, value in refused.items():
        if value:
            raise RuntimeError(
                f"{flag}: expected it to be left out beside ltx-kernels, got {value!r}; "
                f"leave it out, or set {OPTIONS}=0"
            )
    report = _package().optimize(pipe, **options)
    pipe._ltx_report = report
    log.log(logging.INFO if report.replaced else logging.WARNING, "%s", report)
    models = [part for part in pipe.components.values() if hasattr(part, "reset_attention_backend")]
    for model in models:
        if _attention_backends(model) == [default_attention]:
            model.reset_attention_backend()
    backends = sorted({backend for model in models for backend in _attention_backends(model)})
    if backends:
        log.warning(
            "attention runs in diffusers' backend %s; ltx-kernels' attention runs with %s",
            ", ".join(backends),
            own_attention,
        )


def _options() -> dict[str, Any] | None:
    """The arguments of `optimize` from the environment; None where it turns the plug-in off."""
    text = os.environ.get(OPTIONS, "{}").strip()
    if text == "0":
        return None
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{OPTIONS}: expected a JSON object or 0, got {text!r} ({error})") from error
    if not isinstance(options, dict):
        raise ValueError(f"{OPTIONS}: expected a JSON object or 0, got {text!r}")
    return {"graphs": False, **options}  # a server plans its memory before the first request


def _package() -> ModuleType:
    """The repository of the Hub that the environment names, else the installed package."""
    repository = os.environ.get(REPOSITORY)
    if repository:
        from kernels import get_kernel

        # The user has named this one repository. Engines pin versions of kernels in which a list here trusts nobody.
        package: ModuleType = get_kernel(repository, version=1, trust_remote_code=True)
        return package
    try:
        return importlib.import_module("ltx_fused")
    except ModuleNotFoundError as error:
        if error.name != "ltx_fused":
            raise
        raise RuntimeError(
            f"ltx_fused: expected an installed build of ltx-kernels, or its repository in {REPOSITORY}, got neither"
        ) from error


def _attention_backends(model: Any) -> list[str]:
    """Names of the backends that were set for a model's attentions."""
    processors = (getattr(module, "processor", None) for module in model.modules())
    backends = {getattr(processor, "_attention_backend", None) for processor in processors}
    return sorted(str(getattr(backend, "value", backend)) for backend in backends - {None})
