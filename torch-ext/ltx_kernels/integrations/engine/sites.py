"""How `optimize` puts a function in the place of a module's forward, and what it remembers.

A module that is replaced keeps its class, its parameters and its place. It gets a bound method as its ``forward``,
below whatever hooks wrap it (accelerate's, diffusers'), and ``_ltx_kernels``: the site, which it shares with the other
modules of its class. Both travel with a deepcopy, and ``restore`` takes both away.
"""

from __future__ import annotations

import inspect
import pickle
import threading
import time
import types
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, cast

import torch
from torch import Tensor, nn

from ..._torch_private import REPLICATE
from . import threads
from .code import exchanged, patched
from .counts import Counts
from .guards import ATTRIBUTE, RELEASE, class_of, name_of
from .state import forget

PATIENCE = 10.0  # seconds that `restore` waits for a call in another thread that holds tables


def _or_stock(function: Callable[..., Any], guarded: bool) -> Callable[..., Any]:
    """A replaced forward that runs the class's own where that was patched, and where the module was restored.

    A wrapper that keeps the replaced forward may call it after the module was restored.

    guarded: The function asks `why_stock` itself.
    """

    def compute(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if ATTRIBUTE in module.__dict__:
            reason = "" if guarded else why_stock(module)
            if not reason:
                return function(module, *args, **kwargs)
            site_of(module).count_fallback(reason)
        return type(module).forward(module, *args, **kwargs)

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        thread = 0 if torch.compiler.is_compiling() else threads.enter()
        if not thread:
            return compute(module, *args, **kwargs)
        threads.begin(thread, module)
        try:
            return compute(module, *args, **kwargs)
        finally:
            threads.end(thread)

    return forward


@dataclass(frozen=True)
class Entry:
    """What is known about classes of modules: how to compute their forward, and which modules of them that fits."""

    # Names of the classes with their modules; "class + processor class" for an attention that many models share.
    classes: tuple[str, ...]
    forward: Callable[..., Any]
    ops: tuple[str, ...]  # the public functions that it calls
    parameters: tuple[str, ...]  # of the stock forward, without self
    children: frozenset[str] = frozenset()  # the names of the modules that the stock forward knows
    # Names of modules that exist only with some options of the constructor.
    optional_children: frozenset[str] = frozenset()
    level: str = "block"  # the lowest level of `optimize` that replaces them: "norms" or "block"
    roundings: tuple[str, ...] = ("fp32", "eager")
    # Why a module cannot be replaced; empty if it can. What may change later is checked at every call instead.
    why_not: Callable[[nn.Module], str] = lambda module: ""
    # Settings of the site beside the rounding, read from the first module of the class.
    settings: Callable[[nn.Module], Mapping[str, Any]] = lambda module: {}
    # `install` calls it, before it gives the module another forward.
    prepare: Callable[[nn.Module], None] = lambda module: None
    # `optimize` calls it last, when all weights are in their places, to give them another memory order.
    arrange: Callable[[nn.Module], None] = lambda module: None
    # Why no replica of a module can run its class's forward.
    why_not_replicated: Callable[[nn.Module], str] = lambda module: ""
    # Why `restore` cannot put a module back, and what it has to undo beside the forward.
    why_not_restored: Callable[[nn.Module], str] = lambda module: ""
    why_not_root: Callable[[nn.Module], str] = lambda root: ""  # the first of a whole model, asked once
    release: Callable[[nn.Module], None] = lambda module: None
    release_root: Callable[[nn.Module], None] = lambda root: None  # the same, once for each model that it is given
    # Another class whose replaced modules make something in a layout that only modules of this class can read.
    # `restore` takes both out together.
    together_with: str = ""
    # For a module that makes rotary tables in another layout: the suffix of the names of the modules that read them.
    table_readers: str = ""
    # precision="fp8": the names of the linear layers below a module, in groups that read one input, and patterns of
    # names that stay in their own precision unless `skip` is given.
    fp8: Callable[[nn.Module], list[tuple[str, ...]]] = lambda module: []
    never_fp8: tuple[tuple[str, str], ...] = ()  # names of linear layers in no group, each with the reason
    fp8_skip: tuple[str, ...] = ()
    fp8_skip_low: tuple[str, ...] = ()  # the patterns with memory="low"
    weight_only: tuple[str, ...] = ()  # names of linear layers whose weights alone are in fp8 with memory="low"
    apart: frozenset[str] = frozenset()  # children with guards of their own: the snapshot does not look below them
    # (the block's description of a child, the child, input) to the linear layers that read an input like this, if they
    # may be handed quantised rows instead of it.
    readers: Callable[[Any, nn.Module, Tensor], Any] = lambda described, module, input: None
    # Of blocks, for a `Stream`: (block, names of children, input) to whether all these children take quantised rows.
    takes_rows: Callable[[nn.Module, Any, Tensor], bool] = lambda module, names, input: False
    # Names of linear layers in groups: the weights of a group are moved into one storage, for one product.
    packs: Callable[[nn.Module], tuple[tuple[str, ...], ...]] = lambda module: ()
    # Of blocks: names of classes that `optimize` does not replace. A recorded call may contain modules of them, because
    # their forwards run torch functions alone.
    plain: tuple[str, ...] = ()
    # Of blocks: what a call depends on beside modules, modes and arguments. A recorded call is replayed while this
    # function of the block gives the same answer. The function may `refuse` a recording.
    asks: Callable[[nn.Module], Any] | None = None
    # Nothing else is replaced in a model that holds such a module. The norms of an autoencoder, for example, would read
    # channels as strided rows.
    alone: bool = False
    # Its forward asks `why_stock` by itself, where the answer stands from call to call.
    guarded: bool = False
    around: bool = False  # its forward runs the stock one and no ops itself: CUDA graphs of a whole model
    # Why no CUDA graph can hold calls of such a module; empty if one can.
    why_no_graph: str = ""
    # `forward_of` by stock forward.
    _forwards: dict[Callable[..., Any], Callable[..., Any]] = field(init=False, default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "forward", _or_stock(self.forward, self.guarded))

    def forward_of(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The forward for modules with this stock forward, whose signature it shows.

        Pipelines and `generate` choose what they pass by the signature. There is no ``__wrapped__``: accelerate would
        put what it leads to in the place of the forward.
        """
        found = self._forwards.get(stock)
        if found is None:
            ours = cast(types.FunctionType, self.forward)
            found = types.FunctionType(ours.__code__, ours.__globals__, "forward", None, ours.__closure__)
            vars(found)["__signature__"] = inspect.signature(stock)
            self._forwards[stock] = found
        return found


def parameters_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a forward's parameters, without self."""
    return tuple(inspect.signature(forward).parameters)[1:]


@dataclass
class Selection:
    """What `optimize` will replace, and what it leaves alone and why, by the modules' names."""

    modules: dict[str, tuple[nn.Module, Entry]] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)
    # Of each class that does not support the rounding that was asked for: its modules, which stay stock.
    rounded_otherwise: Counter[str] = field(default_factory=Counter)


def short_name(class_name: str) -> str:
    """A class with its library, for people: torch.RMSNorm is not diffusers.RMSNorm."""
    parts = class_name.split(".")
    return f"{parts[0]}.{parts[-1]}"


class Site(Counts):
    """The modules of one class in one optimized object: their settings, and what has happened at run time."""

    def __init__(
        self, entry: Entry, cls: type, stock: Callable[..., Any], rounding: str, settings: dict[str, Any]
    ) -> None:
        super().__init__()
        self.entry, self.cls, self.rounding, self.settings = entry, cls, rounding, settings
        self.class_name = name_of(cls)
        # The class's own forward. It is kept here because torch.compile cannot look it up on the classes of blocks,
        # which diffusers marks allow_in_graph.
        self.stock = stock
        self.forward = entry.forward_of(stock)
        self.modules = 0  # how many share the site
        # The models that were given to `optimize`, and the classes that have to be restored together with this one.
        self.roots: list[weakref.ref[nn.Module]] = []
        self.partners: frozenset[str] = frozenset()
        self.cache: dict[Any, Any] = {}
        # By id, tables in a layout that only replaced modules read: `restore` waits until no call holds one.
        self.handed_out: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    @property
    def name(self) -> str:
        return short_name(self.class_name)

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops that calls have run; before the first call, all that they may run."""
        return tuple(op for op in self.entry.ops if not self.chosen or op in self.chosen)

    @property
    def living_roots(self) -> list[nn.Module]:
        return [root for reference in self.roots if (root := reference()) is not None]

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        copied = Site(self.entry, self.cls, self.stock, self.rounding, dict(self.settings))
        copied.modules, copied.partners = self.modules, self.partners
        # A root that is copied with it becomes its copy. A part that is copied without its root has no roots.
        copied.roots = [weakref.ref(memo[id(root())]) for root in self.roots if id(root()) in memo]
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("an optimized model cannot be pickled: restore it first, or save its state_dict")


def site_of(module: nn.Module) -> Site:
    """The site of a module that was replaced."""
    site: Site = module.__dict__[ATTRIBUTE]
    return site


def why_stock(module: nn.Module) -> str:
    """Why a replaced module has to run its class's forward at every call now; empty if it need not."""
    # torch.compile cannot look the forward up on classes that diffusers marks allow_in_graph.
    if not torch.compiler.is_compiling() and type(module).forward is not site_of(module).stock:
        return "its class has another forward than it had"
    return patched(type(module)) or why_exchanged(module)


def why_exchanged(module: nn.Module) -> str:
    """As `why_stock`, of the methods of the module alone."""
    name = exchanged(module, site_of(module).cls)
    return f"it has another {name} than it had" if name else ""


def stock_forward(module: nn.Module, reason: str, *arguments: Any, **options: Any) -> Any:
    """What the stock module would do, counted as a fallback."""
    site = site_of(module)
    site.count_fallback(reason)
    # torch.compile cannot look the forward up on classes that diffusers marks allow_in_graph.
    stock = site.stock if torch.compiler.is_compiling() else type(module).forward
    return stock(module, *arguments, **options)


# ---- Installing and removing


def _slots(module: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """(holder, key, forward) of every place that keeps a forward of the module; hooks keep the one they wrap."""
    for key in ("forward", "_old_forward"):  # accelerate
        if key in module.__dict__:
            yield module.__dict__, key, module.__dict__[key]
    registry = module.__dict__.get("_diffusers_hook")
    for reference in getattr(registry, "_fn_refs", ()):
        for key in ("forward", "original_forward"):
            yield reference, key, getattr(reference, key, None)


def _put(holder: Any, key: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[key] = value
    else:
        setattr(holder, key, value)


def _is_bound(forward: Any, module: nn.Module, function: Any) -> bool:
    return getattr(forward, "__func__", None) is function and getattr(forward, "__self__", None) is module


def why_not(module: nn.Module, entry: Entry) -> str:
    """Why a module of a known class has to stay as it is; empty if it need not."""
    stock = type(module).forward
    found = parameters_of(stock)
    if found != entry.parameters:
        return f"its forward takes ({', '.join(found)}), expected ({', '.join(entry.parameters)})"
    reason = patched(type(module))
    if reason:
        return reason
    name = exchanged(module, type(module))
    if name:
        return f"its {name} is patched already"
    children = frozenset(name for name, _ in module.named_children())
    if entry.children and not entry.children <= children <= entry.children | entry.optional_children:
        return f"it holds the modules {', '.join(sorted(children))}; expected {', '.join(sorted(entry.children))}"
    known = stock, getattr(module.__dict__.get(ATTRIBUTE), "forward", stock)  # an earlier one is taken out first
    if "forward" in module.__dict__ and not any(_is_bound(f, module, k) for _, _, f in _slots(module) for k in known):
        return "its forward is patched already"
    return entry.why_not(module)


def _stock_replica(module: nn.Module) -> nn.Module:
    """A replica of DataParallel that runs its class's forward: one of ours would run the original, with its weights."""
    site = site_of(module)
    reason = site.entry.why_not_replicated(module)
    if reason:
        raise RuntimeError(f"torch.nn.DataParallel: {reason}; use a process for each GPU")
    site.remark("replicas of DataParallel run the stock modules")
    replica: nn.Module = getattr(type(module), REPLICATE)(module)
    own = replica.__dict__
    if _is_bound(own.get("forward"), module, site.forward):
        del own["forward"]
    for name in [name for name in own if name == REPLICATE or name.startswith(ATTRIBUTE)]:
        del own[name]
    return replica


def install(module: nn.Module, site: Site) -> None:
    stock, ours = type(module).forward, types.MethodType(site.forward, module)
    module.__dict__[ATTRIBUTE] = site  # first: whatever interrupts what follows, `uninstall` finds the module
    module.__dict__[REPLICATE] = types.MethodType(_stock_replica, module)
    site.modules += 1
    site.entry.prepare(module)
    if "forward" not in module.__dict__:
        module.__dict__["forward"] = ours
        return
    for holder, key, forward in list(_slots(module)):
        if _is_bound(forward, module, stock):
            _put(holder, key, ours)


def uninstall(module: nn.Module) -> None:
    site = module.__dict__[ATTRIBUTE]
    site.entry.release(module)
    for holder, key, forward in list(_slots(module)):
        if not _is_bound(forward, module, site.forward):
            continue
        if holder is module.__dict__ and key == "forward":
            del holder[key]
        else:
            _put(holder, key, types.MethodType(type(module).forward, module))
    module.__dict__.pop(REPLICATE, None)
    del module.__dict__[ATTRIBUTE]


def _uninstall_each(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Exception]]:
    """Takes the replaced forwards of modules out; those that failed, with their errors."""
    failed: list[tuple[nn.Module, Exception]] = []
    for module in modules:
        if ATTRIBUTE in module.__dict__:
            try:
                uninstall(module)
            except Exception as error:
                failed.append((module, error))
        release = module.__dict__.pop(RELEASE, None)
        if release is not None:
            release(module)
    return failed


def _uninstall_maker(module: nn.Module, replaced: Iterable[nn.Module]) -> None:
    """Restores a module that makes tables, and waits until no call in another thread holds one for its blocks.

    replaced: All replaced modules. A call of one that contains the maker may be inside of the maker.
    """
    site = site_of(module)
    with threads.alone_with(other for other in replaced if any(part is module for part in other.modules())):
        uninstall(module)
    site.cache.clear()
    deadline = time.monotonic() + PATIENCE
    while threading.active_count() > 1 and len(site.handed_out):
        if time.monotonic() > deadline:  # somebody else may hold it for good
            return
        time.sleep(0.001)


def _why_not_uninstall(root: nn.Module) -> str:
    """Why what was replaced below a module cannot be taken out; empty if it can."""
    ours = {name: module for name, module in root.named_modules() if ATTRIBUTE in module.__dict__}
    found = {class_of(module) for module in ours.values()}
    given = set(map(id, root.modules()))
    for name, module in ours.items():
        site: Site = module.__dict__[ATTRIBUTE]
        reason = site.entry.why_not_restored(module)
        if reason:
            return f"{name or class_of(module)} cannot be restored, and nothing was: {reason}"
        missing = sorted(site.partners - found)
        if missing and not _is_whole(module, given):
            return (
                f"{name or class_of(module)} was optimized together with {missing[0]}, which is not in "
                "the part that was given, and nothing was changed: give the whole model"
            )
    reasons = (entry.why_not_root(root) for entry in dict.fromkeys(map(_entry_of, ours.values())))
    reason = next(filter(None, reasons), "")
    return f"{class_of(root)} cannot be restored, and nothing was: {reason}" if reason else ""


def _entry_of(module: nn.Module) -> Entry:
    return site_of(module).entry


def _is_whole(module: nn.Module, given: Container[int]) -> bool:
    """Whether a model that the module was optimized in is given, or no such model contains the module any more.

    given: The ids of the modules that were given.
    """
    roots = site_of(module).living_roots
    return any(id(root) in given for root in roots) or all(
        part is not module for root in roots for part in root.modules()
    )


def uninstall_all(roots: Iterable[nn.Module]) -> None:
    """Takes every replaced forward below some modules out, or raises and takes none.

    Memory for stock weights may run out on the way. The other modules are restored then, and an error names the first
    module that was not. Such modules work as before.
    """
    roots = list(roots)
    with threads.one_at_a_time():
        _uninstall_all(roots)


def _uninstall_all(roots: Sequence[nn.Module]) -> None:
    failed: list[tuple[nn.Module, Exception]] = []
    for root in roots:
        reason = _why_not_uninstall(root)
        if reason:
            raise RuntimeError(reason)
    with threads.alone_with(module for root in roots for module in root.modules() if ATTRIBUTE in module.__dict__):
        pass  # a call that does not end is an error before anything is changed
    for root in roots:
        entries = dict.fromkeys(_entry_of(module) for module in root.modules() if ATTRIBUTE in module.__dict__)
        modules = list(root.modules())
        replaced = [module for module in modules if ATTRIBUTE in module.__dict__]
        for module in replaced:
            if site_of(module).entry.table_readers:
                _uninstall_maker(module, replaced)
        with threads.alone_with(replaced):
            failed += _uninstall_each(modules)
        for entry in entries:
            entry.release_root(root)
        forget(root)
    if failed:
        module, cause = failed[0]
        name = next(name for root in roots for name, found in root.named_modules() if found is module)
        raise RuntimeError(
            f"{len(failed)} modules were not restored, and work as before: call restore again. The first is "
            f"{name or class_of(module)}: {cause}"
        ) from cause
