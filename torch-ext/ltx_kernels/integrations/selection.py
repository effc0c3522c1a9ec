"""What `optimize` takes of a model: modules of known classes, linear layers for fp8, calls for CUDA graphs."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..quant import fp8_obstacle
from . import diffusers, transformers
from .attention.description import SHARED
from .engine.guards import class_of, submodule
from .engine.rotary_tables import keep_table_readers_together
from .engine.sites import Entry, Selection, why_not
from .linear import fp8, fp8_weights
from .linear.checkpoints import Weights
from .linear.lora import base_of
from .linear.scaled_weights import holds_codes
from .linear.weight_only import WEIGHT_ONLY
from .registry import entry_for
from .replay.cuda_graphs import Plan, with_graphs

# What a pipeline's call spends its time in, by the names of its components.
DENOISERS = ("transformer", "transformer_2", "transformer_ref", "unconditional_transformer", "unet", "controlnet")
AUTOENCODER = "vae"
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
ENTRIES = {**diffusers.ENTRIES, **transformers.ENTRIES}


def left_in_bf16(selection: Selection, skip: Sequence[str] | None) -> str:
    """What the report says of memory="low": the patterns of layers that it left in their own precision."""
    entries = {id(entry): entry for _, entry in selection.modules.values()}
    patterns = dict.fromkeys(p for entry in entries.values() for p in patterns_in_bf16(entry, skip, True))
    return f"memory low leaves in bf16, of the blocks' linear layers: {', '.join(patterns) or 'none'}"


def notes_of(selection: Selection, component: str, file: Weights, skip: Sequence[str] | None, low: bool) -> list[str]:
    """What the report says about a file of weights."""
    start = f"{component}." if component else ""
    names = {
        n[len(start) :]
        for n, (_, entry) in selection.modules.items()
        if entry in (fp8.LINEAR, WEIGHT_ONLY) and n.startswith(start)
    }
    patterns = set[str]()
    if skip is None:
        patterns = {p for _, entry in selection.modules.values() for p in patterns_in_bf16(entry, None, low)}
    default = sum(any(fnmatch.fnmatchcase(start + name, pattern) for pattern in patterns) for name in names)
    return file.notes(names, default)


def select(roots: Mapping[str, nn.Module], level: str, rounding: str) -> Selection:
    selection = Selection()
    seen: set[nn.Module] = set()  # a pipeline may hold one model under two names
    for component, root in roots.items():
        known = root in seen
        modules = root.named_modules(memo=seen, prefix=component)
        found = [(name, module, entry_for(ENTRIES, module)) for name, module in modules]
        alone = any(entry is not None and entry.alone for _, _, entry in found)
        for name, module, entry in found:
            if entry is None:
                reason = transformers.why_unknown(module)
                if level == "block" and diffusers.is_block(root, module):
                    reason = f"{class_of(module)} is not known: its norms and attentions alone"
                if name.rpartition(".")[0] in selection.modules and class_of(module) in SHARED:
                    reason = f"its processor is {class_of(module.processor)}"
                if reason:
                    selection.left_alone[name] = reason
                continue
            if (level == "norms" and entry.level != "norms") or (alone and not entry.alone):
                continue
            if rounding not in entry.roundings:
                selection.rounded_otherwise[class_of(module)] += 1
                continue
            known = True
            reason = why_not(module, entry)
            if reason:
                selection.left_alone[name] = reason
            else:
                selection.modules[name] = module, entry
        if not known:
            selection.left_alone[component] = (
                f"nothing in {class_of(root)} is of a class that is known at level {level}"
            )
    if not roots:
        selection.left_alone["the pipeline"] = (
            f"it has none of the components {', '.join(DENOISERS)}, and no {AUTOENCODER} or text encoder that is known "
            f"at level {level}"
        )
    keep_table_readers_together(selection)
    return selection


def codes_without_scales(selection: Selection) -> str:
    """What the report says of a model whose scales were lost on loading; asked of one layer of each block."""
    for name, (block, entry) in selection.modules.items():
        for path in next(iter(entry.fp8(block)), ())[:1]:
            linear = submodule(block, path)  # None below a module of somebody else's
            if linear is not None and holds_codes(base_of(linear)):
                return (
                    f"{name}.{path}: its weights look like fp8 codes without their scales, so that results are wrong: "
                    'load the file with optimize(..., precision="fp8", weights=FILE)'
                )
    return ""


def select_graphs(selection: Selection, roots: Mapping[str, nn.Module], auto: bool) -> None:
    """Has calls of whole components replayed; of an autoencoder, whose own calls are several, its decoder's.

    auto: Where it pays. An autoencoder is left out: it holds the most memory and does not wait for the host. So is a
    language model by itself: the calls of its tokens have a KV cache among their arguments.
    """
    plan = Plan(auto)
    for component, root in roots.items():
        can_generate = getattr(root, "can_generate", None)
        if auto and not component and can_generate is not None and can_generate():
            continue
        alone = {
            n: m for n, (m, entry) in selection.modules.items() if entry.alone and any(m is p for p in root.modules())
        }
        if alone and auto:
            continue
        for name, module in (alone or {component: root}).items():
            _, entry = selection.modules.get(name, (module, None))
            replayed = with_graphs(module, entry, plan)
            reason = why_not(module, replayed) if replayed.around else ""
            if reason:
                selection.left_alone.setdefault(name, f"its calls are not replayed: {reason}")
            else:
                selection.modules[name] = module, replayed


def _groups(selection: Selection, native: Container[str] = ()) -> Iterator[tuple[Entry, Entry, dict[str, Any]]]:
    """(entry of a block, entry of its layers, layers by name) for each group of linear layers that share an input.

    The entry of the layers is LINEAR, or WEIGHT_ONLY for modulation.

    native: Components whose blocks are left out.
    """
    for block_name, (block, entry) in list(selection.modules.items()):
        if block_name.partition(".")[0] in native:
            continue
        for paths in entry.fp8(block):
            part = block.get_submodule(paths[0].partition(".")[0])
            if "processor" in part.__dict__ and entry_for(ENTRIES, part) is None:
                continue  # the attention is not known, and stays as it is
            names = [f"{block_name}.{path}" if block_name else path for path in paths]
            yield entry, fp8.LINEAR, {name: base_of(block.get_submodule(path)) for name, path in zip(names, paths)}
        for path in entry.weight_only:
            linear = submodule(block, path)
            if linear is not None:  # a last block may have none
                yield entry, WEIGHT_ONLY, {f"{block_name}.{path}" if block_name else path: base_of(linear)}


def check_device(device: torch.device) -> None:
    """RuntimeError where a device has no products in fp8."""
    obstacle = fp8_obstacle(device)
    if obstacle:
        raise RuntimeError(
            f'precision: expected a GPU of compute capability 8.9 or newer for "fp8", got {obstacle}; nothing was '
            "changed"
        )


def patterns_in_bf16(entry: Entry, skip: Sequence[str] | None, low: bool) -> Sequence[str]:
    """Patterns of a block's linear layers that stay in their own precision; low: with memory="low"."""
    if skip is not None:
        return skip
    return entry.fp8_skip_low if low else entry.fp8_skip


def layers_for_fp8(root: nn.Module, skip: Sequence[str] | None, low: bool) -> set[str]:
    """The names of the linear layers that precision="fp8" takes of a model, which may be on "meta"."""
    return {
        name
        for block, entry, layers in _groups(select({"": root}, "block", "fp32"))
        for name, linear in layers.items()
        if (low or entry is fp8.LINEAR)
        and class_of(linear) == fp8_weights.LINEAR_CLASS
        and not fp8_weights.why_not_shape(linear)
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns_in_bf16(block, skip, low))
    }


def why_in_bf16(
    root: nn.Module, kept: Container[str], skip: Sequence[str] | None, low: bool, loaded: bool
) -> list[str]:
    """What the report says of a model's linear layers and embeddings that are not in fp8, by the reason.

    kept: The names of the layers that are.
    loaded: The checkpoint was in fp8 already.
    """
    selection = select({"": root}, "block", "fp32")
    offered = {name: (block, linear) for block, _, layers in _groups(selection) for name, linear in layers.items()}
    never = {
        f"{name}.{path}": reason for name, (_, entry) in selection.modules.items() for path, reason in entry.never_fp8
    }
    found: dict[str, dict[str, None]] = {}
    for name, module in root.named_modules():
        if isinstance(module, nn.Embedding):
            reason = "a table, of which rows are read"
        elif not isinstance(module, nn.Linear) or name in kept:
            continue
        elif name not in offered:
            reason = never.get(name, "in no block that is known")
        else:
            block, linear = offered[name]
            patterns = patterns_in_bf16(block, skip, low)
            reason = fp8_weights.why_not_shape(linear)
            if not reason and linear.weight.dtype == torch.float32:
                reason = "its class keeps it in float32"
            elif not reason and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                reason = "skip names it" if skip else "it costs the result more than it saves"
            elif not reason:
                reason = "the checkpoint has it so" if loaded else "memory does not name it"
        found.setdefault(reason, {})[re.sub(r"\b\d+\b", "*", name)] = None
    return [f"not in fp8: {', '.join(names)}: {reason}" for reason, names in found.items()]


def select_fp8(
    selection: Selection, skip: Sequence[str] | None, low: bool, files: Mapping[str, Weights], native: Container[str]
) -> list[list[nn.Linear]]:
    """Adds the linear layers of known blocks to the selection; those that share an input, together.

    low: With memory="low", which takes modulation as well. A file of this package takes what it has in fp8.
    native: Components that stay in their own precision.
    """
    groups = []
    known = {name for _, _, layers in _groups(selection, native) for name in layers}
    for pattern in skip or ():
        if known and not fnmatch.filter(known, pattern):
            raise ValueError(f"skip: expected patterns of names such as {min(known)}, got {pattern}, which fits none")
    in_files, needed = set[str](), set[str]()
    for component, file in files.items():
        names = {".".join(filter(None, (component, name))) for name in file.linears}
        in_files |= names
        needed |= names if file.all_or_error else set()
    for block, entry, layers in _groups(selection, native):
        patterns = patterns_in_bf16(block, skip, low)
        group = []
        for name, linear in layers.items():
            if not (low or entry is fp8.LINEAR or name in needed):
                continue
            if name not in in_files if files else any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                continue
            if class_of(linear) != fp8_weights.LINEAR_CLASS:
                selection.left_alone[name] = f"it is {class_of(linear)}, not {fp8_weights.LINEAR_CLASS}"
                continue
            check_device(linear.weight.device)
            reason = fp8_weights.why_not_shape(linear) if files else why_not(linear, entry)
            if reason:
                selection.left_alone[name] = reason
            else:
                selection.modules[name] = linear, entry
                group.append(linear)
        if group:
            groups.append(group)
    missing = sorted(needed - selection.modules.keys())
    if missing:
        reason = selection.left_alone.get(missing[0], "it is in no block that is known here")
        raise ValueError(f"weights: {missing[0]} is in fp8 in the file and cannot be here: {reason}")
    return groups
