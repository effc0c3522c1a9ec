"""Puts the package's ops into models of other libraries, and takes them out again."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import torch
from torch import nn

from .._checks import ATTENTION_PRECISION, ROUNDING, choice
from . import diffusers, transformers
from .engine.guards import class_of
from .engine.sites import Entry, Selection, Site, install, short_name, uninstall_all
from .engine.threads import one_at_a_time
from .hub_layers import kernel_mapping as kernel_mapping
from .linear import fp8_weights
from .linear.checkpoints import Placed, Weights, open_weights
from .linear.fp8_model import finish
from .linear.lora import shared_weights
from .linear.merged_adapters import follow as follow_merged_adapters
from .linear.offload import carried_bytes, check_in_memory, is_offloaded
from .linear.packing import pack
from .parallel import context
from .parallel.guidance import split_batch as split_batch
from .quantizer import quantization_config
from .registry import entry_for
from .report import Report
from .selection import (
    AUTOENCODER,
    DENOISERS,
    ENTRIES,
    TEXT_ENCODERS,
    codes_without_scales,
    left_in_bf16,
    notes_of,
    select,
    select_fp8,
    select_graphs,
)

LEVELS = ("norms", "block")
PRECISIONS = ("native", "fp8")


def optimize(
    obj: Any,
    *,
    level: str = "block",
    precision: str = "native",
    attention: str = "native",
    rounding: str = "fp32",
    components: Sequence[str] | None = None,
    skip: Sequence[str] | None = None,
    memory: str | None = None,
    stock_weights: str = "cpu",
    weights: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | None = None,
    graphs: bool | str = "auto",
    strict: bool = False,
) -> Report:
    """Puts the package's ops into a model or a pipeline, in place.

    Modules are recognised by their exact class, and keep it and their parameters; each gets another ``forward``. At a
    call that the ops cannot take (a gradient is needed, autocast is on in another dtype, weights are quantised,
    offloaded or somewhere else) the stock forward runs, and the report counts it. The weights of an attention's query,
    key and value move into one storage and become views of it, which takes no memory. The weights of convolutions in
    autoencoders and UNets move into channels-last memory. Called again, `optimize` replaces what an earlier call did to
    the components that it takes; level "norms" takes an autoencoder and text encoders that are not named out again.

    To undo it::

        ltx.restore(pipe)                   # or report.restore()
        with ltx.optimize(pipe): ...        # only within

    Args:
        obj: A pipeline of diffusers, or a module: a whole model or a part of one.
        level: "block" replaces the work of whole transformer blocks, decoder layers and decoders where their class is
            known, and norms and activations everywhere; "norms" only the norms.
        precision: "native" leaves the linear layers as they are. "fp8" quantises those of the blocks it knows: the
            weights now, per output channel, the activations in the ops that make them, per row. It needs bfloat16 and a
            GPU of compute capability 8.9 or newer. Adapters (LoRA) of peft run in bfloat16 beside the fp8 weights,
            whether they are loaded before or after; a weight that one is fused into is quantised again.
        attention: "native" attends in the model's dtype. "int8" attends in 8 bits (`attention`, precision="int8") where
            that op takes the call and gains: self-attention and joint attention without a mask, of heads of 128 columns
            and 4608 keys or more, on a Hopper GPU. The report counts the other calls of these attentions, which attend
            as with "native".
        rounding: "fp32" rounds each result once. "eager" rounds where the stock modules do, and leaves out what
            cannot: packed GEMMs, the GELU epilogue, and the single blocks of FLUX.1's and HunyuanVideo's families.
        components: Names of the pipeline's components to optimize. None: its denoisers (transformer, transformer_2,
            transformer_ref, unconditional_transformer, unet, controlnet), as far as it has them, and with level "block"
            its autoencoder (vae), where its class is known and it is not in float32, and its text encoders
            (text_encoder, text_encoder_2 to text_encoder_4); those without known blocks not with ``graphs=False``. Text
            encoders that are not named stay in their own precision.
        skip: With "fp8", patterns (as in fnmatch) of names of linear layers to leave in their own precision. None: the
            few that cost the result more than they save, which for LTX-Video are the output of the cross-attention
            (its branch has no gate) and its key and value (of a few text tokens). Patterns replace this list, and an
            empty sequence leaves none of it. A name is as in ``named_modules()``, after the component's name in a
            pipeline. A pattern that fits no layer is an error.
        memory: "low" implies precision "fp8", and has fewer layers in bfloat16: the text stream's are in fp8 too where
            the error allows it, and the linear layers that make the blocks' modulation hold fp8 weights and multiply in
            bfloat16. The report's first line says what it saved. `skip` replaces the list of those that stay. None: as
            much as `precision` says.
        stock_weights: With "fp8", where the quantised layers keep their stock weights. "cpu": in the host's memory,
            until `restore`. The fp8 weights take their place in the parameters, so that the model needs less memory
            than before and an offload moves only these. "beside": where they are, so that nothing is copied and the
            model takes half as much memory again; in a model that is offloaded already it means "cpu". "free":
            nowhere. There is no `restore` then, and the model's own ``save_pretrained`` fails.
        weights: With "fp8", weights to load that are in fp8 already: a folder that `Report.save_weights` wrote, or a
            checkpoint in scaled fp8 as other programs write it (docs/checkpoints.md), as a safetensors file or the
            index of its shards, in its authors' names or diffusers'. A pipeline takes a path for each component that is
            no autoencoder: ``weights={"transformer": FILE}``. All tensors of these components are read from it, and
            nothing is quantised. The model may be on "meta". `restore` has nothing to give back then. The file says
            which layers are in fp8; with another program's, `skip` names layers to multiply by their scales instead.
        graphs: Replay calls of each component, or of the module given, as CUDA graphs, which launch all kernels at
            once. That is faster where the GPU waits for the host: short clips, few tokens, fp8. "auto": of denoisers
            and text encoders, a signature once the GPU has waited for the host as long as a capture takes, where memory
            is free; a graph that gains nothing is dropped again. True: also of autoencoders (of their encoder and their
            decoder), and each signature at its second call. False: never. A call that a graph cannot hold (gradients,
            hooks, offload, LoRA layers, torch.compile, another stream, a cache among the arguments) runs ordinarily,
            and the report counts it. A module keeps 8 signatures. Each holds the memory of a call's intermediate
            results.
        strict: Raise, and change nothing, where something of a known class or a norm of transformers has to be left
            alone, or nothing is known.

    Returns:
        A report of what was replaced, what was left alone and why; print it, before and after a run.

    Raises:
        TypeError: ``obj`` is neither a module nor a pipeline, or another argument has a wrong type.
        ValueError: An unknown ``level``, ``precision``, ``attention``, ``rounding`` or component, or options that do
            not go together.
        RuntimeError: With ``strict``, something has to be left alone; the text says what and why. With "fp8", the GPU
            is too old. Nothing was changed then.
    """
    _check_memory(memory)
    low = memory == "low"
    precision = "fp8" if low and precision == "native" else precision
    _check_options(level, precision, rounding, skip, stock_weights, weights, graphs, strict)
    if choice("attention", ATTENTION_PRECISION, attention) and (level != "block" or rounding != "fp32"):
        raise ValueError(f'attention: "int8" goes with level "block" and rounding "fp32", got {level} and {rounding}')
    replaceable = _roots(obj, components, lambda name, part: _is_default(name, part) or name in TEXT_ENCODERS)
    with one_at_a_time():
        default = _is_denoiser if level == "norms" else _is_default_with_graphs if graphs else _is_default
        roots = _roots(obj, components, default)
        native = [name for name in roots if components is None and name in TEXT_ENCODERS]
        # An autoencoder has no layers in fp8 and no file, and is left out beside a transformer. By itself it is an
        # error.
        models = {n: root for n, root in roots.items() if n not in native and not _is_autoencoder(root)} or roots
        files = {} if weights is None else open_weights(models, weights, skip)
        selection = select(roots, level, rounding)
        groups = select_fp8(selection, skip, low, files, native) if precision == "fp8" else []
        if strict and selection.left_alone:
            lines = [f"{name or 'the model'}: {reason}" for name, reason in selection.left_alone.items()]
            raise RuntimeError(
                "strict: nothing was changed, because these would be left alone:\n  " + "\n  ".join(lines)
            )
        for root in roots.values():
            context.check(root)
        if groups:
            check_in_memory(models.values())
        codes = "" if files else codes_without_scales(selection)
        replaced = {module for module, _ in selection.modules.values()}
        if graphs:
            select_graphs(selection, roots, graphs == "auto")
        if stock_weights == fp8_weights.BESIDE and any(map(is_offloaded, models.values())):
            stock_weights = fp8_weights.HELD
        title = (
            f"{type(obj).__name__}, level {level}, precision {precision}, attention {attention}, rounding {rounding}"
        )
        report = Report(title, left_alone=selection.left_alone)
        report.notes += [
            f'stock with rounding "{rounding}": {count} {short_name(name)}'
            for name, count in selection.rounded_otherwise.items()
        ]
        if native and precision == "fp8":
            report.notes.append(f"not in fp8, since `components` does not name them: {', '.join(native)}")
        if codes:
            report.notes.append(codes)
            warnings.warn(f"ltx-kernels: {codes}", stacklevel=2)
        uninstall_all(replaceable.values())
        report._roots = [weakref.ref(root) for root in roots.values()]
        report._in_files = {name: weakref.ref(root) for name, root in models.items()}
        before = 0 if files else carried_bytes(models.values())
        try:
            _install(selection, groups, rounding, attention, stock_weights, list(files.values()), report)
            for root in roots.values():
                context.follow(root, diffusers.PLANS.get(class_of(root)))
        except BaseException:  # an interrupt as well: all or nothing
            with contextlib.suppress(RuntimeError) if files else contextlib.nullcontext():  # what was read stays
                uninstall_all(roots.values())
            raise
        for component, file in files.items():
            report.notes += notes_of(selection, component, file, skip, low)
        if groups:
            for root in models.values():
                follow_merged_adapters(root)
            report.notes.append(finish(models.values(), groups, stock_weights))
        if low:
            report.target += f"; {_saved(before, carried_bytes(models.values()))}"
            report.notes.append(left_in_bf16(selection, skip))
        if replaced.isdisjoint(module for root in models.values() for module in root.modules()):
            where = f" in {', '.join(models)}" if replaced else ""  # beside the autoencoder
            warnings.warn(f"ltx-kernels: nothing was replaced{where}\n{report}", stacklevel=2)
        return report


@torch.inference_mode(False)  # what is made here outlives the call, and must not be inference tensors
def _install(
    selection: Selection,
    groups: Sequence[Sequence[nn.Linear]],
    rounding: str,
    attention: str,
    stock_weights: str,
    files: Sequence[Weights],
    report: Report,
) -> None:
    """Puts everything in its place that can be taken out again."""
    sites: dict[tuple[str, Entry], Site] = {}
    for module, entry in selection.modules.values():
        name = class_of(module)
        if (name, entry) not in sites:
            settings = {**entry.settings(module), "attention": attention}
            site = Site(entry, type(module), type(module).forward, rounding, settings)
            site.roots = list(report._roots)
            sites[name, entry] = site
            (report._around if entry.around else report.sites).append(site)
        install(module, sites[name, entry])
    pairs = {(site.class_name, site.entry.together_with) for site in report.sites}
    pairs = {(one, other) for one, other in pairs if any(other == name for name, _ in sites)}
    for site in report.sites:
        name = site.class_name
        site.partners = frozenset({b for a, b in pairs if a == name} | {a for a, b in pairs if b == name})
    puts = [put for file in files for put in file.read(groups)]  # all is read before anything is put in its place
    for put in puts:
        put()
    shared = shared_weights(root for reference in report._roots if (root := reference()) is not None)
    for linears in [] if files else groups:
        fp8_weights.quantise_weights(linears, stock_weights, shared)
    for module, entry in selection.modules.values():
        entry.arrange(module)
    if rounding == "fp32":
        reasons = (pack(module, entry.packs(module)) for module, entry in selection.modules.values())
        unpacked = Counter(filter(None, reasons))
        report.notes += [f"not packed, {count} attentions: {reason}" for reason, count in unpacked.items()]


def _saved(before: int, after: int) -> str:
    """What the report's first line says of memory="low"; before: 0 where the weights came from a file."""
    unit, name = (2**30, "GiB") if max(before, after) >= 2**30 else (2**20, "MiB")
    numbers = [f"{size / unit:.2f}" for size in (before, after) if size]
    return f"memory low: {' -> '.join(numbers)} {name} of weights"


def LTXKernelsFp8Config(skip: Sequence[str] | None = None, memory: str | None = None) -> Any:
    """A quantization_config of diffusers and of transformers: ``from_pretrained`` loads a model into fp8.

    diffusers' ``from_single_file`` takes it too. The model is optimized then, as by
    ``optimize(model, precision="fp8")``, and no weight of a quantised layer was on its device in bfloat16 but the one
    that was being quantised. diffusers' checkpoints in scaled fp8 keep their values and scales (docs/checkpoints.md).
    ``save_pretrained`` writes the weights in fp8. ``model.hf_quantizer.report`` is the report.

    Equivalent to, but for the memory that it needs::

        model = AutoModel.from_pretrained(repository, torch_dtype=torch.bfloat16).to("cuda")
        ltx.optimize(model, precision="fp8", skip=skip, memory=memory, stock_weights="free")

    Args:
        skip, memory: As in `optimize`, for checkpoints in bfloat16 and in scaled fp8.

    Returns:
        An object of a class that is registered with both libraries by the first call. A folder that
        ``save_pretrained`` wrote needs this call too before it is loaded.

    Raises:
        ImportError: Neither diffusers nor transformers 5 is installed.
        ValueError, TypeError: ``skip`` is no list of patterns, or ``memory`` is unknown.
    """
    _check_memory(memory)
    if skip is not None:
        _check_names("skip", "patterns", skip)
    return quantization_config(skip, memory, optimize)


def restore(obj: Any, *, components: Sequence[str] | None = None) -> None:
    """Gives every module its stock forward back.

    Packed weights get a storage each again, and an autoencoder's their memory order; they are the same parameters with
    the same values.

    Args:
        obj: What was given to `optimize`, or a deepcopy of it. An LTX-Video transformer can only be restored as a
            whole, since its blocks share a rotary table.
        components: As in `optimize`; None: all that a pipeline has.

    Raises:
        TypeError: ``obj`` is neither a module nor a pipeline, or ``components`` no list.
        ValueError: An unknown component.
        RuntimeError: ``obj`` is a part of a model that can only be restored as a whole, or its stock weights were
            freed. Nothing was restored then.
    """
    uninstall_all(_roots(obj, components).values())


def _check_memory(memory: str | None) -> None:
    if memory not in (None, "low"):
        raise ValueError(f'memory: expected None or "low", got {memory!r}')


def _check_options(
    level: str,
    precision: str,
    rounding: str,
    skip: Sequence[str] | None,
    stock_weights: str,
    weights: Any,
    graphs: bool | str,
    strict: bool,
) -> None:
    if level not in LEVELS:
        raise ValueError(f'level: expected "norms" or "block", got {level!r}')
    if precision not in PRECISIONS:
        raise ValueError(f'precision: expected "native" or "fp8", got {precision!r}')
    choice("rounding", ROUNDING, rounding)
    if stock_weights not in fp8_weights.STOCK_WEIGHTS:
        raise ValueError(f'stock_weights: expected "beside", "cpu" or "free", got {stock_weights!r}')
    if not isinstance(graphs, bool) and graphs != "auto":
        error = ValueError if isinstance(graphs, str) else TypeError
        raise error(f'graphs: expected True, False or "auto", got {graphs!r}')
    if not isinstance(strict, bool):
        raise TypeError(f"strict: expected True or False, got {strict!r}")
    if skip is not None:
        _check_names("skip", "patterns", skip)
    if precision == "fp8":
        if level != "block" or rounding != "fp32":
            raise ValueError(
                f'precision: "fp8", which memory="low" sets, goes with level "block" and rounding "fp32", got {level} '
                f"and {rounding}"
            )
    elif skip is not None or stock_weights != fp8_weights.HELD or weights is not None:
        raise ValueError(f'skip, stock_weights and weights: expected precision "fp8" with them, got {precision!r}')
    paths = weights.values() if isinstance(weights, Mapping) else [weights]
    if weights is not None and not all(isinstance(path, (str, os.PathLike, Placed)) for path in paths):
        raise TypeError(f"weights: expected a path, or a path for each component, got {weights!r}")
    if "" in paths:
        raise ValueError("weights: expected a path, got an empty text; '.' is the folder that you are in")
    if weights is not None and stock_weights != fp8_weights.HELD:
        raise ValueError("weights: expected no stock_weights with it: there are none beside the file's")


def _check_names(argument: str, what: str, names: Sequence[str]) -> None:
    if isinstance(names, str):
        raise ValueError(f"{argument}: expected a list of {what}, got the string {names!r}")
    if not isinstance(names, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument}: expected a list of {what}, got {names!r}")


def _is_autoencoder(root: nn.Module) -> bool:
    """Whether a component is an autoencoder that the package knows."""
    entries = (entry_for(ENTRIES, module) for module in root.modules())
    return any(entry is not None and entry.alone for entry in entries)


def _is_denoiser(name: str, component: nn.Module) -> bool:
    return name in DENOISERS


def _is_default(name: str, component: nn.Module) -> bool:
    """Whether `optimize` takes a component that is not named.

    An autoencoder in float32 has to be named: those have not been timed (docs/vae.md). A text encoder without known
    blocks, such as CLIP, stays as it is.
    """
    if name in TEXT_ENCODERS:
        entries = (entry_for(transformers.ENTRIES, module) for module in component.modules())
        return any(entry is not None and entry.level == "block" for entry in entries)
    if name != AUTOENCODER or not _is_autoencoder(component):
        return _is_denoiser(name, component)
    return next(component.parameters()).dtype != torch.float32


def _is_default_with_graphs(name: str, component: nn.Module) -> bool:
    """The same with `graphs`, which every text encoder may gain from."""
    return name in TEXT_ENCODERS or _is_default(name, component)


def _roots(
    obj: Any, components: Sequence[str] | None, default: Callable[[str, nn.Module], bool] = lambda name, component: True
) -> dict[str, nn.Module]:
    """The modules to search, by the name of the component; one without a name if there are no components.

    default: Which components to take where none is named.
    """
    if components is not None:
        _check_names("components", "names", components)
        if not components:
            raise ValueError("components: expected the name of a component, got an empty list")
    if isinstance(obj, nn.Module):
        if components is not None:
            raise ValueError(f"components: expected None with a module, got {list(components)!r}")
        return {"": obj}
    held = getattr(obj, "components", None)
    if not isinstance(held, Mapping):
        raise TypeError(f"obj: expected a torch.nn.Module or a pipeline with components, got {class_of(obj)}")
    modules = {name: value for name, value in held.items() if isinstance(value, nn.Module)}
    if components is None:
        return {name: module for name, module in modules.items() if default(name, module)}
    for name in components:
        if name not in modules:
            raise ValueError(f"components: expected names among {', '.join(modules)}, got {name!r}")
    return {name: modules[name] for name in components}
