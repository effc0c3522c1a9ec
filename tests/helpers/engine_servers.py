"""The part of sglang-diffusion and of vllm-omni that starts a server, as far as a plug-in meets it, without a GPU.

Each engine comes in two forms. The stand-in is a few lines here: it finds the plug-ins by their entry points, applies
them, and hands over a pipeline as the engine does. The other form runs the engine's own files from an installed wheel.
It needs none of the wheel's dependencies: what these files import from elsewhere in the engine is replaced by empty
classes, or by the few functions that are named here.
"""

from __future__ import annotations

import enum
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import pkgutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from .build import ROOT

Modules = dict[str, dict[str, Any]]
PLUGINS = {"sglang": "sglang.multimodal_gen.plugins", "vllm_omni": "vllm_omni.general_plugins"}
DISTRIBUTIONS = {"sglang": "sglang", "vllm_omni": "vllm-omni"}
SGLANG = "sglang.multimodal_gen.runtime"
ADAPTER = "vllm_omni.diffusion.models.diffusers_adapter"
CPU = torch.device("cpu")


class Empty:
    """What a file of a wheel imports and these tests do not need."""

    def __init__(self, *arguments: Any, **named: Any) -> None: ...


class Finder:
    """Finds modules below some packages: a file of the wheel where it is named, else an empty module.

    files: Modules that are read from the wheel.
    members: What empty modules hold beside empty classes.
    """

    def __init__(self, packages: Sequence[str], files: dict[str, Path], members: Modules) -> None:
        self.packages, self.files, self.members = packages, files, members

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.packages or not name.rpartition(".")[2].islower():  # or it is a class
            return None
        if name in self.files:
            return importlib.util.spec_from_file_location(name, self.files[name])
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.members.get(module.__name__, {}))

        def empty(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (Empty,), {})

        module.__getattr__ = empty  # type: ignore[method-assign]


def unpacked_plugins(folder: Path) -> Path:
    """The wheel of engines/ in a folder: the package, and the metadata in which engines find entry points."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT / "engines", check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
    wheel.unlink()
    return folder


def files_of_wheel(package: str, names: Sequence[str]) -> dict[str, Path]:
    """Where the installed distribution has these modules. The test is skipped without it."""
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTIONS[package])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"NOT RUN: {DISTRIBUTIONS[package]} is not installed (make test-engines)")
    found = {}
    for name in names:
        stem = str(distribution.locate_file(name.replace(".", "/")))
        found[name] = next(path for path in (Path(f"{stem}.py"), Path(stem) / "__init__.py") if path.exists())
    return found


def version_of(package: str) -> str:
    """Of the installed distribution."""
    return importlib.metadata.version(DISTRIBUTIONS[package])


def plugins_of(package: str) -> list[Callable[[], None]]:
    return [entry.load() for entry in importlib.metadata.entry_points(group=PLUGINS[package])]


@contextmanager
def engine(package: str, members: Modules, files: dict[str, Path]) -> Iterator[None]:
    """The engine's modules can be imported within, and are gone at the end."""
    packages = [package, "vllm"] if package == "vllm_omni" else [package]
    if files and importlib.util.find_spec("torchvision") is None:
        packages.append("torchvision")  # of which sglang's file imports a module that it needs for images alone
    finder = Finder(packages, files, members)
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [name for name in sys.modules if name.partition(".")[0] in (*packages, "ltx_kernels_engines")]:
            del sys.modules[name]


# ---- sglang-diffusion


class HookType(enum.Enum):
    AFTER = "after"


class HookRegistry:
    hooks: dict[str, Callable[..., Any]] = {}  # noqa: RUF012

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType = HookType.AFTER) -> None:
        assert hook_type is HookType.AFTER and target not in cls.hooks
        cls.hooks[target] = hook

    @classmethod
    def apply_hooks(cls) -> None:
        """Wraps each target; as in sglang, a result of None keeps the target's."""
        for target, hook in cls.hooks.items():
            owner_name, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(owner_name)
            stock = getattr(owner, name)

            def wrapper(*args: Any, stock: Any = stock, hook: Any = hook, **kwargs: Any) -> Any:
                result = stock(*args, **kwargs)
                changed = hook(result, *args, **kwargs)
                return result if changed is None else changed

            setattr(owner, name, wrapper)
        cls.hooks.clear()


class SglangPipeline:
    """Hands over a pipeline where sglang's class loads one from a folder."""

    def __init__(self, pipe: Any, server_args: Any) -> None:
        self.diffusers_pipe = self._load_diffusers_pipeline(pipe, server_args)

    def _load_diffusers_pipeline(self, model_path: Any, server_args: Any) -> Any:
        return model_path


def sglang_arguments(**flags: Any) -> SimpleNamespace:
    """sglang's ServerArgs, as far as its diffusers backend reads them."""
    arguments = {
        "trust_remote_code": False,
        "revision": None,
        "pipeline_config": SimpleNamespace(vae_slicing=False, vae_tiling=False),
        "component_residency": None,
        "should_cpu_offload_component": lambda name: False,
        "has_requested_component_attention_backends": lambda: False,
        "attention_backend": None,
        "cache_dit_config": None,
        "enable_torch_compile": False,
    }
    return SimpleNamespace(**{**arguments, **flags})


def start_sglang(pipe: Any, **flags: Any) -> Any:
    """The pipeline that a stand-in of sglang serves; what stops its start is raised."""
    members: Modules = {
        f"{SGLANG}.platforms.plugins": {"HookRegistry": HookRegistry, "HookType": HookType},
        f"{SGLANG}.pipelines.diffusers_pipeline": {
            "DiffusersPipeline": type("DiffusersPipeline", (SglangPipeline,), {})
        },
    }
    with engine("sglang", members, {}):
        for plugin in plugins_of("sglang"):
            plugin()
        HookRegistry.apply_hooks()
        served = pkgutil.resolve_name(f"{SGLANG}.pipelines.diffusers_pipeline:DiffusersPipeline")
        return served(pipe, sglang_arguments(**flags)).diffusers_pipe


def start_sglang_wheel(
    folder: str, device: torch.device = CPU, dtype: torch.dtype = torch.float32, **flags: Any
) -> Any:
    """The pipeline that the installed sglang's diffusers backend serves from a folder."""
    names = ["sglang.srt.plugins.hook_registry", "sglang.srt.environ", f"{SGLANG}.platforms.plugins"]
    names.append(f"{SGLANG}.pipelines.diffusers_pipeline")
    files = files_of_wheel("sglang", names)
    members: Modules = {
        f"{SGLANG}.distributed": {"get_local_torch_device": lambda: device},
        f"{SGLANG}.managers.memory_managers.component_residency": {
            "resolve_diffusers_pipeline_offload": lambda residency: None
        },
        f"{SGLANG}.platforms": {
            "AttentionBackendEnum": enum.Enum("AttentionBackendEnum", "FA TORCH_SDPA"),
            "PLATFORM_PLUGINS_GROUP": "sglang.multimodal_gen.platforms",
            "get_selected_platform_dist": lambda: None,
        },
        f"{SGLANG}.utils.hf_diffusers_utils": {"maybe_download_model": lambda path, **named: path},
        f"{SGLANG}.utils.logging_utils": {"init_logger": logging.getLogger},
        f"{SGLANG}.utils.precision": {"resolve_precision": lambda *args, **named: dtype},
    }
    with engine("sglang", members, files):
        plugins = importlib.import_module(f"{SGLANG}.platforms.plugins")
        plugins.load_plugins()
        plugins.apply_plugin_hooks()
        backend = importlib.import_module(f"{SGLANG}.pipelines.diffusers_pipeline")
        return backend.DiffusersPipeline(folder, sglang_arguments(**flags)).diffusers_pipe


# ---- vllm-omni


class VllmOmniAdapter:
    """Hands over a pipeline where vllm-omni's class loads one; like that one it always sets a backend of attention."""

    def __init__(self, *, od_config: Any, device: Any) -> None:
        self.od_config = od_config

    def load_weights(self) -> None:
        self._pipeline = self.od_config.model
        self._pipeline.transformer.set_attention_backend(self.od_config.backend)


def start_vllm_omni(pipe: Any, backend: str = "native") -> Any:
    """The pipeline that a stand-in of vllm-omni serves; `backend` is diffusers' name of one for attention."""
    adapter = type("DiffusersAdapterPipeline", (VllmOmniAdapter,), {})
    members: Modules = {f"{ADAPTER}.pipeline_diffusers_adapter": {"DiffusersAdapterPipeline": adapter}}
    with engine("vllm_omni", members, {}):
        for plugin in plugins_of("vllm_omni") * 2:  # more than once, as in the engine
            plugin()
        served = adapter(od_config=SimpleNamespace(model=pipe, backend=backend), device=CPU)
        served.load_weights()
        return served._pipeline


class Profiler:
    def setup_diffusion_pipeline_profiler(self, **named: Any) -> None: ...


def vllm_omni_config(folder: str, **fields: Any) -> SimpleNamespace:
    """vllm-omni's OmniDiffusionConfig, as far as its diffusers adapter reads it."""
    values = {
        "model": folder,
        "model_class_name": None,
        "diffusers_pipeline_cls": None,
        "diffusers_load_kwargs": {},
        "quantization_config": None,
        "enable_layerwise_offload": False,
        "enable_cpu_offload": False,
        "vae_use_slicing": False,
        "vae_use_tiling": False,
        "diffusion_attention_config": SimpleNamespace(default=SimpleNamespace(backend="TORCH_SDPA")),
        "diffusion_offload_config": None,
        "parallel_config": SimpleNamespace(tensor_parallel_size=1, cfg_parallel_size=1, sequence_parallel_size=1),
        "cache_backend": None,
        "enforce_eager": False,
        "enable_diffusion_pipeline_profiler": False,
    }
    return SimpleNamespace(**{**values, **fields})


def start_vllm_omni_wheel(
    folder: str, device: torch.device = CPU, dtype: torch.dtype = torch.float32, **fields: Any
) -> Any:
    """The pipeline that the installed vllm-omni's diffusers adapter serves from a folder."""
    adapter = f"{ADAPTER}.pipeline_diffusers_adapter"
    names = ["vllm_omni.plugins", adapter, f"{ADAPTER}.pipeline_utils", f"{ADAPTER}.quantization_utils"]
    files = files_of_wheel("vllm_omni", names)
    members: Modules = {
        "vllm.envs": {"VLLM_PLUGINS": None},
        "vllm.plugins": {"load_general_plugins": lambda: None},
        "vllm_omni.diffusion.profiler.diffusion_pipeline_profiler": {"DiffusionPipelineProfilerMixin": Profiler},
    }
    with engine("vllm_omni", members, files):
        importlib.import_module("vllm_omni.plugins").load_omni_general_plugins()
        cls = importlib.import_module(adapter).DiffusersAdapterPipeline
        assert issubclass(cls, nn.Module)
        served = cls(od_config=vllm_omni_config(folder, dtype=dtype, **fields), device=device)
        served.load_weights()
        return served._pipeline
