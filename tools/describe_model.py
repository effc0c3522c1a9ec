"""Prints the skeleton of a family's file for a model of diffusers: `Attention`, `GatedMLP` and `Block`.

    python tools/describe_model.py Krea2Transformer2DModel
    python tools/describe_model.py Krea2Transformer2DModel --config '{"num_layers": 2}'

The model is made without memory for its parameters. Names of classes, submodules, norms and arguments come from it.
What a forward computes does not: lines with "check" ask for it, and docs/adding-a-model.md has a table of the answers.
The skeleton can be imported, and its descriptions fit the model's modules.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parents[1] / "torch-ext" / "ltx_kernels" / "integrations"
FEED_FORWARD = "diffusers.models.attention.FeedForward"
GENERIC_ATTENTION = "diffusers.models.attention_processor.Attention"
# Attributes of a model class that a description has to know of, and what for.
ATTRIBUTES = {
    "_keep_in_fp32_modules": "kept in float32: casts=True where a block or an attention reads one",
    "_cp_plan": "how ranks share the tokens: see PLANS in ltx.py",
    "_repeated_blocks": "the classes of blocks that matter",
    "_skip_keys": "arguments that are caches, which another call changes",
}
EXAMPLE = '{"num_layers": 2}'  # of --config
HEADER = '''"""{title}: TODO what the blocks are."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..attention.description import Attention
from ..blocks.block import Block
from ..blocks.gated_mlp import GatedMLP
'''


def class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def parameters(function: Any) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(function).parameters if name != "self")


def is_attention(module: Any) -> bool:
    return hasattr(module, "processor")


def is_norm(module: Any) -> bool:
    return "Norm" in type(module).__name__


def is_known(name: str) -> bool:
    """Whether norm_forms.py has a class, by its whole name."""
    return f'"{name}"' in (SOURCES / "engine" / "norm_forms.py").read_text()


def children(modules: Iterable[Any]) -> dict[str, list[Any]]:
    """The submodules of modules of one class, by name."""
    found: dict[str, list[Any]] = {}
    for module in modules:
        for name, child in module.named_children():
            found.setdefault(name, []).append(child)
    return found


def constant(name: str) -> str:
    """ATTENTION for KreaAttention, and so on: the words of a class's name."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).upper()


def text(fields: dict[str, Any], name: str, checks: Iterable[str] = ()) -> str:
    lines = [f"    {field}={value}," for field, value in fields.items()]
    return "\n".join([f"{name}(", *lines, *(f"    # check: {check}" for check in checks), ")"])


def attention(modules: list[Any]) -> str:
    """The description of an attention class."""
    module, found = modules[0], children(modules)
    processor = module.processor
    call = inspect.getsource(type(processor).__call__)
    fields: dict[str, Any] = {}
    checks = []
    if class_name(module) != GENERIC_ATTENTION:
        fields["classes"] = repr((class_name(module),))
        given = parameters(type(module).forward)
        fields["parameters"] = repr(given)
        if "hidden_states" not in given and "kwargs" not in given:
            checks.append("inputs: which parameters are the input, the second stream or context, and the mask")
    fields["processor"] = repr(class_name(processor))
    heads = next((name for name in ("heads", "num_heads", "num_attention_heads") if hasattr(module, name)), "heads")
    if heads != "heads":
        fields["heads"] = repr(heads)
    projections = [name for name in ("to_q", "to_k", "to_v", "to_query", "to_key", "to_value") if name in found]
    if projections != ["to_q", "to_k", "to_v"]:
        fields["projections"] = repr(tuple(projections or ["TODO"]))
    norms = [name for name, parts in found.items() if is_norm(parts[0])]
    kinds = sorted({class_name(part) for name in norms for part in found[name]})
    if kinds != ["torch.nn.modules.normalization.RMSNorm"]:
        fields["norm"] = repr(kinds[0]) if kinds else None
        checks += [f"{kind} is not in FORMS of engine/norm_forms.py" for kind in kinds if not is_known(kind)]
    if norms and norms[:2] != ["norm_q", "norm_k"]:
        fields["norms"] = repr(tuple(norms[:2]))
    weight = getattr(found[norms[0]][0], "weight", None) if norms else None
    if weight is not None and projections and weight.numel() == getattr(module, projections[0]).out_features:
        fields["across_heads"] = True
    if "to_out" not in found:
        last = [name for name in found if "out" in name]
        fields["output"] = repr(last[-1] if last else "")
    elif next(module.to_out.children(), None) is not None and "to_out[1]" not in call:
        fields["output"] = repr("to_out.0")
    if any(name.startswith("add_") for name in found):
        fields["added"] = True
        checks.append("text_first=False where the rows of the text come after the others")
    elif second := [name for name in found if name.endswith(("_t", "_c", "_txt", "_context"))]:
        fields["added"] = True
        checks.append(f"added_projections, added_norms, added_output: {', '.join(second)}; text_first")
    elif "encoder_hidden_states" in call:
        checks.append("cross=True in a copy for attentions that read another input")
    if "attn.scale" in call:
        fields["scale"] = repr("scale")
    if "fused_projections" in call or "to_qkv" in call:
        fields["fuses"] = True
    names = [name for name in parameters(type(processor).__call__) if re.search("rotary|rope|freqs", name)]
    if names != ["image_rotary_emb"]:
        fields["rope"] = repr(names[0] if names else "")
    if names:
        checks += [
            "layout='half' where the columns i and i + D / 2 turn together",
            "tables, from the argument to (cos, sin): halves, first_halves or of_complex of engine/rotary_tables.py",
        ]
    if "mask" in call:
        checks.append("mask: which class of attention/masks.py a mask of the stock code is")
    return text(fields, "Attention", checks)


def gated_mlp(module: Any) -> str:
    """The description of an MLP of the model's own."""
    names = [name for name, child in module.named_children() if hasattr(child, "in_features")]
    width = getattr(module, names[0]).in_features if names else 0
    up = tuple(name for name in names if getattr(module, name).in_features == width)
    down = [name for name in names if name not in up]
    others = [name for name, child in module.named_children() if name not in names]
    fields = {
        "classes": repr((class_name(module),)),
        "parameter": repr(parameters(type(module).forward)[0]),
        "projections": repr(up),
        "activation": repr(others[0] if others else ""),
        "down": repr(down[0] if down else "TODO"),
    }
    checks = ["projections name the gate first"]
    if others:
        checks.append("the activation is in ACTIVATIONS of blocks/gated_mlp.py")
    else:
        checks.append("kind: ERF or TANH of blocks/gated_mlp.py where the forward computes GELU; SiLU is the default")
    return text(fields, "GatedMLP", checks)


def block(modules: list[Any], names: dict[str, str]) -> Iterator[str]:
    """The forward's signature and the description of a class of blocks. names: Constants of the parts, by class."""
    cls, found = type(modules[0]), children(modules)
    constant_name = constant(cls.__name__)
    signature = inspect.signature(cls.forward)
    arguments = [p.replace(annotation="Any") for p in signature.parameters.values() if p.name != "self"]
    given = ", ".join(["self: Any", *(str(argument).replace("'", "") for argument in arguments)])
    paths = norm_paths(modules)
    norms = {path: tuple(sorted({class_name(norm) for norm in at})) for path, at in paths.items()}
    holders = {path for path, at in paths.items() if all(map(holds_norm, at))}
    parts = {name: names[class_name(p[0])] for name, p in found.items() if class_name(p[0]) in names}
    feed_forwards = tuple(name for name, p in found.items() if class_name(p[0]) == FEED_FORWARD)
    rest = [name for name in found if name not in (*norms, *parts, *feed_forwards)]
    optional = [name for name, p in {**found, **paths}.items() if len(p) < len(modules)]
    file = Path(inspect.getsourcefile(cls) or "")
    yield f"def {constant_name.lower()}_forward({given}) -> Any:"
    yield f'    """The stock forward: {file.name}, line {inspect.getsourcelines(cls.forward)[1]}."""'
    yield "    ...  # its body on a Stream: step 3 of docs/adding-a-model.md\n\n"
    tables = [name for name, _ in modules[0].named_parameters(recurse=False)]
    streams = [a.name for a in arguments if a.name in ("hidden_states", "encoder_hidden_states", "x")]
    mods = [a.name for a in arguments if re.search("temb|adaln|mod", a.name)]
    fields: dict[str, Any] = {
        "classes": repr((class_name(modules[0]),)),
        "forward": f"{constant_name.lower()}_forward",
    }
    if rest:
        fields["children"] = f"frozenset({sorted(set(rest) - set(optional))!r})"
    if optional:
        fields["optional_children"] = f"frozenset({optional!r})"
    fields["streams"] = repr(tuple(streams[:2] or [arguments[0].name]))
    fields["tensors"] = repr((*mods, *tables))
    fields["norms"] = repr({path: kinds for path, kinds in norms.items() if path not in holders})
    if holders:
        fields["modules"] = repr({path: norms[path] for path in norms if path in holders})
    if parts:
        fields["attentions"] = "{" + ", ".join(f"{name!r}: {part}" for name, part in parts.items()) + "}"
    if feed_forwards:
        fields["feed_forwards"] = repr(feed_forwards)
    modulation = [f"{path}.{name}" for path in paths if path in holders for name in linears_of(paths[path])]
    if modulation:
        fields["modulation"] = repr(tuple(modulation))
    checks = [
        "streams and tensors: which arguments are residual streams, and which ops read beside them",
        "casts=True where the stock forward computes in float32 and casts back",
        "ops, where the defaults (modulated norms, gated residuals) are not what the forward calls",
    ]
    kinds = {class_name(norm) for at in paths.values() for norm in at if not holds_norm(norm)}
    checks += [f"{kind} is not in FORMS of engine/norm_forms.py" for kind in sorted(kinds) if not is_known(kind)]
    yield f"{constant_name} = {text(fields, 'Block', checks)}\n"


def norm_paths(modules: Iterable[Any]) -> dict[str, list[Any]]:
    """The norms among a block's children, and the norms inside of these, by path."""
    found: dict[str, list[Any]] = {}
    for module in modules:
        for name, child in module.named_children():
            for path, norm in child.named_modules(prefix=name) if is_norm(child) else ():
                if is_norm(norm):
                    found.setdefault(path, []).append(norm)
    return found


def linears_of(modules: Iterable[Any]) -> list[str]:
    """The linear layers among the children of norms that make their modulation."""
    return [name for name, parts in children(modules).items() if hasattr(parts[0], "in_features")]


def holds_norm(module: Any) -> bool:
    """Whether a norm module, such as AdaLayerNormZero, holds the norm as a child: the forward reads its parts."""
    return any(map(is_norm, module.children()))


def blocks_of(model: Any) -> Iterator[Any]:
    """The blocks in the model's lists of modules."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList):
            yield from filter(is_block, map(unwrapped, module))


def skeleton(model: Any) -> str:
    """The whole file for a model."""
    by_class: dict[str, list[Any]] = {}
    for made in blocks_of(model):
        by_class.setdefault(class_name(made), []).append(made)
    parts: dict[str, list[Any]] = {}
    for modules in by_class.values():
        for module in modules:
            for child in module.children():
                if is_attention(child) or is_mlp(child):
                    parts.setdefault(class_name(child), []).append(child)
    names = {name: constant(name.rpartition(".")[2]) for name in parts}
    lines = [HEADER.format(title=type(model).__name__)]
    for attribute, meaning in ATTRIBUTES.items():
        value = getattr(type(model), attribute, None)
        if value:
            lines.append(f"# {attribute} = {' '.join(str(value).split())[:160]}: {meaning}")
    for name, modules in parts.items():
        described = attention(modules) if is_attention(modules[0]) else gated_mlp(modules[0])
        lines.append(f"{names[name]} = {described}")
    for modules in by_class.values():
        lines += ["\n", *block(modules, names)]
    entries = [*names.values(), *(constant(name.rpartition(".")[2]) for name in by_class)]
    return "\n".join([*lines, f"ENTRIES = ({', '.join(entries)},)"])


def unwrapped(module: Any) -> Any:
    """A block, also from within a module that holds nothing else, as HiDream's do."""
    children = list(module.children())
    return unwrapped(children[0]) if len(children) == 1 and not is_block(module) else module


def is_block(module: Any) -> bool:
    return any(is_attention(child) for child in module.children())


def is_mlp(module: Any) -> bool:
    linears = sum(hasattr(child, "in_features") for child in module.children())
    others = class_name(module) == FEED_FORWARD or is_attention(module) or is_norm(module)
    return linears in (2, 3) and not others


def json_object(given: str) -> dict[str, Any]:
    try:
        value = json.loads(given)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object such as {EXAMPLE}, got {given} ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object such as {EXAMPLE}, got {given}")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="the name of a model class of diffusers, such as LTXVideoTransformer3DModel")
    parser.add_argument("--config", type=json_object, default={}, help="arguments of its constructor, as JSON")
    arguments = parser.parse_args()
    import diffusers
    import torch

    cls = getattr(diffusers, arguments.model, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        parser.error(
            f"argument model: expected a model class of diffusers {diffusers.__version__}, got {arguments.model}"
        )
    try:
        with torch.device("meta"):
            model = cls(**arguments.config)
    except Exception as error:  # constructors raise errors of many types
        parser.error(
            f"argument --config: expected the arguments that the constructor of {arguments.model} needs, got "
            f"{type(error).__name__}: {error}"
        )
    if next(blocks_of(model), None) is None:
        parser.error(f"argument model: expected a model whose blocks have an attention, got {arguments.model}")
    print(skeleton(model))


if __name__ == "__main__":
    main()
