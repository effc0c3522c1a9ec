"""Hooks of the pip package: they read build.toml and build through tools/build.py."""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


def load_builder(root: str) -> ModuleType:
    path = Path(root) / "tools" / "build.py"
    spec = importlib.util.spec_from_file_location("ltx_kernels_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module


class MetadataHook(MetadataHookInterface):
    """Version and dependencies, from build.toml.

    A missing torch is an error here, before pip resolves dependencies: it would otherwise download a torch of several
    GB for a build that must use the one the user runs.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        builder = load_builder(self.root)
        project = builder.load_project(Path(self.root))
        oldest = min(project.stable_abi.values())
        try:
            builder.find_torch(oldest)
        except builder.BuildError as error:
            sys.exit(f"error: {error}")
        metadata["version"] = str(project.version)
        metadata["dependencies"] = [f"torch>={'.'.join(map(str, oldest))}"]


class BuildHook(BuildHookInterface):
    """Add the compiled library: the CUDA one where nvcc and a CUDA torch are installed, else the CPU one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        builder = load_builder(self.root)
        project = builder.load_project(Path(self.root))
        try:
            path = builder.build_for_pip(project)
        except builder.BuildError as error:
            sys.exit(f"error: {error}")
        module = self.metadata.name.replace("-", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp310-abi3-linux_{platform.machine()}"
        generated = [path / builder.OPS_FILE, *path.glob("*.so")]
        if version == "editable":
            # Python finds the package under pip's name by a link to torch-ext: the generated files must lie there too.
            builder.install_generated(project, generated)
            link = Path(self.root, "build", ".editable", module)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(project.package_dir)
        else:
            for file in generated:
                build_data["force_include"][str(file)] = f"{module}/{file.name}"
