"""engines/: the plug-ins of sglang-diffusion and vllm-omni, under stand-ins and under files of the installed wheels."""

from __future__ import annotations

import ast
import copy
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from helpers import engine_servers
from helpers.build import REPO_ID, ROOT

sys.path.insert(0, str(ROOT / "examples"))
import ltx_pipeline

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

Start = Callable[..., Any]
BLOCKS = "diffusers.LTXVideoTransformerBlock"
STAND_INS: dict[str, Start] = {"sglang": engine_servers.start_sglang, "vllm_omni": engine_servers.start_vllm_omni}
WHEELS: dict[str, Start] = {
    "sglang": engine_servers.start_sglang_wheel,
    "vllm_omni": engine_servers.start_vllm_omni_wheel,
}
each_engine = pytest.mark.parametrize("name", STAND_INS)


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_servers.unpacked_plugins(tmp_path_factory.mktemp("site-packages"))


@pytest.fixture(autouse=True)
def installed(site_packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site_packages))
    monkeypatch.setenv("LTX_KERNELS_REPO", REPO_ID)
    monkeypatch.delenv("LTX_KERNELS_OPTIMIZE", raising=False)


@pytest.fixture(scope="module")
def stock() -> Any:
    ltx_pipeline.quiet()
    return ltx_pipeline.load_pipeline("tiny", torch.device("cpu"), torch.float32)


@pytest.fixture
def pipe(stock: Any) -> Any:
    return type(stock)(**{**stock.components, "transformer": copy.deepcopy(stock.transformer)})


@pytest.fixture(scope="module")
def folder(stock: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model") / "tiny")
    stock.save_pretrained(folder)
    return folder


def latents(pipe: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    made = pipe("a kite", num_frames=9, height=32, width=64, num_inference_steps=2, generator=generator,
                output_type="latent")  # fmt: skip
    return made.frames


def has_report(pipe: Any) -> bool:
    return hasattr(pipe, "_ltx_report")


@each_engine
def test_a_served_pipeline_is_optimized(
    name: str, pipe: Any, stock: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = latents(stock)
    monkeypatch.setenv("LTX_KERNELS_OPTIMIZE", '{"components": ["transformer", "text_encoder"]}')
    with caplog.at_level(logging.INFO):
        served = STAND_INS[name](pipe)
    assert served is pipe
    assert served._ltx_report.replaced[BLOCKS] == len(pipe.transformer.transformer_blocks)
    assert served._ltx_report.replaced["transformers.T5LayerNorm"] > 0
    logged = [record for record in caplog.records if record.name == f"{name}.ltx_kernels"]
    assert [(record.levelname, record.message) for record in logged] == [("INFO", str(served._ltx_report))]
    torch.testing.assert_close(latents(served), want, rtol=1e-5, atol=1e-5)
    assert served._ltx_report.fallbacks == {}
    served._ltx_report.restore()


@each_engine
def test_turned_off(name: str, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is refused either, and no build is needed."""
    monkeypatch.setenv("LTX_KERNELS_OPTIMIZE", "0")
    monkeypatch.delenv("LTX_KERNELS_REPO")
    flags = {"cache_dit_config": "cache.yaml", "enable_torch_compile": True} if name == "sglang" else {}
    served = STAND_INS[name](pipe, **flags)
    assert not has_report(served)
    assert not [module for module in served.transformer.modules() if "forward" in vars(module)]


BAD_OPTIONS = {
    "not JSON": (
        "{precision: fp8}",
        ValueError,
        "LTX_KERNELS_OPTIMIZE: expected a JSON object or 0, got '{precision: ",
    ),
    "no object": ('["fp8"]', ValueError, "LTX_KERNELS_OPTIMIZE: expected a JSON object or 0, got "),
    "not a value": ('{"precision": "fp9"}', ValueError, 'precision: expected "native" or "fp8", got \'fp9\''),
    "not an argument": ('{"precison": "fp8"}', TypeError, "unexpected keyword argument 'precison'"),
    "not strict": ('{"strict": true, "components": ["scheduler"]}', ValueError, "components: "),
}


@each_engine
@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_a_broken_option_stops_the_start(name: str, case: str, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text, error, message = BAD_OPTIONS[case]
    monkeypatch.setenv("LTX_KERNELS_OPTIMIZE", text)
    with pytest.raises(error) as raised:
        STAND_INS[name](pipe)
    assert message in str(raised.value)
    assert not has_report(pipe)
    assert not [module for module in pipe.transformer.modules() if "forward" in vars(module)]


REFUSED = {
    "--cache-dit-config": ({"cache_dit_config": "cache.yaml"}, "'cache.yaml'"),
    "--enable-torch-compile": ({"enable_torch_compile": True}, "True"),
}


@pytest.mark.parametrize("flag", REFUSED)
def test_sglangs_flags_that_are_refused(flag: str, pipe: Any) -> None:
    flags, value = REFUSED[flag]
    with pytest.raises(RuntimeError) as raised:
        engine_servers.start_sglang(pipe, **flags)
    assert str(raised.value) == (
        f"{flag}: expected it to be left out beside ltx-kernels, got {value}; "
        "leave it out, or set LTX_KERNELS_OPTIMIZE=0"
    )
    assert not has_report(pipe)


def test_a_backend_of_attention_is_told(pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It stays, because the user may have asked for it; "native" of vllm-omni is how one asks for none."""
    backends = {getattr(processor, "_attention_backend", "") for processor in pipe.transformer.attn_processors.values()}
    assert backends == {None}
    engine_servers.start_vllm_omni(pipe, "_native_math")
    assert "attention runs in diffusers' backend _native_math; ltx-kernels' attention runs with " in caplog.text
    assert caplog.messages[-1].endswith("--diffusion-attention-backend TORCH_SDPA")
    assert {p._attention_backend.value for p in pipe.transformer.attn_processors.values()} == {"_native_math"}
    caplog.clear()
    engine_servers.start_vllm_omni(pipe, "native")
    assert "attention runs in" not in caplog.text
    assert {p._attention_backend for p in pipe.transformer.attn_processors.values()} == {None}
    pipe.transformer.set_attention_backend("native")
    engine_servers.start_sglang(pipe)
    assert caplog.messages[-1].endswith("backend native; ltx-kernels' attention runs with --attention-backend left out")


def test_nothing_to_replace_is_a_warning(
    pipe: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe.transformer = torch.nn.Linear(2, 2)
    monkeypatch.setenv("LTX_KERNELS_OPTIMIZE", '{"components": ["transformer"]}')
    with pytest.warns(UserWarning, match="nothing was replaced"):
        engine_servers.start_sglang(pipe)
    (record,) = (record for record in caplog.records if record.name == "sglang.ltx_kernels")
    assert record.levelname == "WARNING" and "nothing was replaced" in record.message
    monkeypatch.setenv("LTX_KERNELS_OPTIMIZE", '{"components": ["transformer"], "strict": true}')
    with pytest.raises(RuntimeError, match="strict"):
        engine_servers.start_sglang(pipe)


# ---- Which build


def test_the_installed_package(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def optimize(target: Any, **options: Any) -> Any:
        given.append((target, options))
        return SimpleNamespace(replaced={"a class": 1})

    installed = ModuleType("ltx_fused")
    installed.optimize = optimize  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ltx_fused", installed)
    monkeypatch.delenv("LTX_KERNELS_REPO")
    monkeypatch.setenv("LTX_KERNELS_OPTIMIZE", '{"graphs": true}')
    engine_servers.start_sglang(pipe)
    assert given == [(pipe, {"graphs": True})]


def test_no_build(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LTX_KERNELS_REPO")
    monkeypatch.setitem(sys.modules, "ltx_fused", None)
    monkeypatch.setitem(sys.modules, "ltx_kernels", ModuleType("ltx_kernels"))  # Lightricks' package, which is another
    with pytest.raises(RuntimeError) as raised:
        engine_servers.start_sglang(pipe)
    assert str(raised.value) == (
        "ltx_fused: expected an installed build of ltx-kernels, or its repository in LTX_KERNELS_REPO, got neither"
    )


# ---- The installed engines' own files


@each_engine
def test_the_wheel_serves_an_optimized_pipeline(
    name: str, folder: str, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = WHEELS[name](folder)
    assert served._ltx_report.replaced[BLOCKS] == len(stock.transformer.transformer_blocks)
    torch.testing.assert_close(latents(served), latents(stock), rtol=1e-5, atol=1e-5)
    monkeypatch.setenv("LTX_KERNELS_OPTIMIZE", "0")
    assert not has_report(WHEELS[name](folder))


@each_engine
def test_the_wheel_does_not_start_with_a_broken_option(name: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTX_KERNELS_OPTIMIZE", '{"precision": "fp9"}')
    with pytest.raises(ValueError, match="precision"):
        WHEELS[name](folder)


def test_the_wheel_of_sglang_refuses(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="--enable-torch-compile: expected it to be left out"):
        engine_servers.start_sglang_wheel(folder, enable_torch_compile=True)
    cache_dit = ModuleType("cache_dit")
    cache_dit.load_configs = lambda config: {}  # type: ignore[attr-defined]
    cache_dit.enable_cache = lambda pipe: pipe  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cache_dit", cache_dit)
    with pytest.raises(RuntimeError, match="--cache-dit-config: expected it to be left out"):
        engine_servers.start_sglang_wheel(folder, cache_dit_config="cache.yaml")


FLAGS = {
    "sglang": (
        f"{engine_servers.SGLANG}.server_args.server_args",
        ["--cache-dit-config", "--enable-torch-compile", "--attention-backend", "--backend"],
    ),
    "vllm_omni": ("vllm_omni.entrypoints.cli.serve", ["--diffusion-load-format", "--diffusion-attention-backend"]),
}


@each_engine
def test_the_flags_that_are_named_exist(name: str) -> None:
    """In the parsers of the installed wheels, and the arguments of sglang that the hook reads."""
    module, flags = FLAGS[name]
    tree = ast.parse(engine_servers.files_of_wheel(name, [module])[module].read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert set(flags) <= texts
    if name == "sglang":
        fields = {
            node.target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        assert {"cache_dit_config", "enable_torch_compile"} <= fields
