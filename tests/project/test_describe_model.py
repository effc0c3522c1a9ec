"""tools/describe_model.py: the skeleton that it prints is Python, and its descriptions fit the model's modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("diffusers")
from families import families
from helpers.diffusers_models import BLOCK_NAMES

TOOL = Path(__file__).resolve().parents[2] / "tools" / "describe_model.py"
FAMILIES = families()


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("describe_model", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def described(ltx: ModuleType, text: str) -> dict[str, Any]:
    """What a skeleton defines, run as a file of the families."""
    names: dict[str, Any] = {"__package__": f"{ltx.__name__}.integrations.diffusers", "__name__": "skeleton"}
    exec(compile(text, "skeleton", "exec"), names)
    return names


@pytest.mark.host
@pytest.mark.parametrize("name", ["flux", "hidream", "ideogram4", "ltx", "lumina2", "mochi", "wan-t2v", "z_image"])
def test_a_skeleton_fits_the_model(ltx: ModuleType, tool: ModuleType, name: str) -> None:
    """Every attention, MLP and block that the family knows fits what was printed for its class."""
    model = FAMILIES[name].make()
    registry, sites = ltx.integrations.registry, ltx.integrations.engine.sites
    entries = [registry.entry_of(found) for found in described(ltx, tool.skeleton(model))["ENTRIES"]]
    by_class = {key: entry for entry in entries for key in entry.classes}
    fits = 0
    for path, module in model.named_modules():
        known = registry.entry_for(ltx.integrations.diffusers.ENTRIES, module)
        if known is not None and known.level == "block" and sites.short_name(known.classes[0]).endswith(BLOCK_NAMES):
            entry = registry.entry_for(by_class, module)
            assert entry is not None, path
            assert sites.why_not(module, entry) == "", path
            fits += 1
    assert fits


@pytest.mark.host
def test_a_skeleton_tells_what_the_tables_lack(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["mochi"].make()
    lacks = "# check: diffusers.models.normalization.MochiRMSNorm is not in FORMS"
    assert lacks not in tool.skeleton(model)
    monkeypatch.setattr(tool, "is_known", lambda name: False)
    assert lacks in tool.skeleton(model)


@pytest.mark.host
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NoSuchModel"], "argument model: expected a model class of diffusers "),
        (["DDIMScheduler"], "argument model: expected a model class of diffusers "),
        (["VQModel"], "argument model: expected a model whose blocks have an attention, got VQModel"),
        (
            ["Transformer2DModel"],
            "argument --config: expected the arguments that the constructor of Transformer2DModel",
        ),
        (["UniDiffuserModel"], "argument --config: expected the arguments that the constructor of UniDiffuserModel"),
        (["VQModel", "--config", '{"size": 1}'], "got TypeError: "),
        (["VQModel", "--config", "{bad"], "argument --config: expected a JSON object such as"),
        (["VQModel", "--config", "[1]"], "argument --config: expected a JSON object such as"),
    ],
)
def test_what_it_cannot_describe_is_one_error(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["describe_model.py", *arguments])
    with pytest.raises(SystemExit) as end:
        tool.main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err
