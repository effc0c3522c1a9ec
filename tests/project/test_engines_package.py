"""engines/ as a distribution: what an installation holds, and what the engines find in it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.build_checks import ROOT, builder
from helpers.engine_servers import PLUGINS, unpacked_plugins

PROJECT = builder.load_project()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the distribution, without the network."""
    folder = tmp_path_factory.mktemp("installed")
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(folder), str(ROOT / "engines")]
    pytest.importorskip("hatchling")
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_entry_points(installed: Path, tmp_path: Path) -> None:
    (distribution,) = importlib.metadata.distributions(path=[str(installed)])
    found = {point.group: (point.name, point.value) for point in distribution.entry_points}
    assert found == {
        group: ("ltx_kernels", f"ltx_kernels_engines.{engine}:register") for engine, group in PLUGINS.items()
    }
    (unpacked,) = importlib.metadata.distributions(path=[str(unpacked_plugins(tmp_path))])
    assert unpacked.read_text("METADATA") == distribution.read_text("METADATA")


def test_metadata(installed: Path) -> None:
    (distribution,) = importlib.metadata.distributions(path=[str(installed)])
    assert distribution.name == "ltx-kernels-engines" and distribution.version == str(PROJECT.version)
    assert distribution.metadata["License-Expression"] == PROJECT.license
    urls = [url.partition(", ")[2] for url in distribution.metadata.get_all("Project-URL")]
    assert urls and all(url.startswith(PROJECT.source) for url in urls)
    assert distribution.requires == ["kernels>=0.14.1"]
    names = {str(file) for file in distribution.files or ()}
    assert "ltx_kernels_engines/py.typed" in names
    (licence,) = (name for name in names if name.endswith("licenses/LICENSE"))
    assert (installed / licence).read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_loading_an_entry_point_imports_no_engine_and_no_torch(installed: Path) -> None:
    """Engines load all of them in their command line too."""
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        "import ltx_kernels_engines.sglang, ltx_kernels_engines.vllm_omni\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'kernels', 'sglang', 'vllm_omni'}))"
    )
    result = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
