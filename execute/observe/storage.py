# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""The storage tracker: every tensor storage from its birth to its death, each with one category, on fake or real tensors.

A TorchDispatchMode sees every operation and a weak reference sees every storage die, so the sum of the living is what an allocator
would call allocated, without rounding. Where autograd would add two gradients in place if nobody watched (it does not under a dispatch
mode, nor for fake tensors), the tracker adds in place. A storage has one category for its whole life, given when it is known what became of it:

    parameters      what the model's parameters (their local shards) live in
    master_weights  what a strategy says is its copy of the parameters in a wider dtype
    gradients       what a parameter's .grad lives in when a backward ends
    optimizer       what the optimizer's state lives in
    communication   born inside a communication hook (FSDP2's, or a `communication` region of a strategy), or an unsharded gradient of FSDP2
    framework       constant buffers of the model: rotary tables, the mask
    activations     born in a forward (or a recompute) and still alive when it ended: autograd saved it; and the batch
    temporaries     everything else

The first that fits, in that order, wins.
"""

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from costmodel.report import CATEGORIES, HostMemory, Peak
from execute import compat

HOST = "host"
"""A category outside the device, left out of every sum: step counters that PyTorch keeps in host memory."""
ON_HOST = {category: f"host {category}" for category in CATEGORIES}
"""Categories of what a strategy offloads: summed apart."""
BY_HOST = ("clip", "optimizer")
"""Phases that the host's CPU does where state is offloaded."""
LIBRARY = "library"
"""A category outside the program, left out of every sum: what a library makes for itself, such as gloo's copy of what it reduces and scatters.
It is first seen as the storage of a view that nobody has seen before."""
BORN_AS_VIEWS = ("lift_fresh",)
"""Operations that return their argument, and with which a constant's life begins."""
STATES = ("parameters", "gradients", "optimizer")
OUTSIDE = (HOST, LIBRARY, *ON_HOST.values())
ORDER = (HOST, LIBRARY, *ON_HOST.values(), "parameters", "master_weights", "gradients", "optimizer", "communication", "framework", "activations", "temporaries")
NAMESPACES = ("aten", "c10d", "_c10d_functional", "fsdp")
"""Operations that a moment may be named after."""


class Moment(NamedTuple):
    """When something happened: the step, its phase, the module (or hook) at work, and the operation."""

    step: str
    phase: str
    where: str
    op: str

    def __str__(self) -> str:
        return f"{self.phase}, {self.where or 'model'} ({self.op})"


class Event(NamedTuple):
    """A storage grew or shrank."""

    storage: int
    delta: int
    moment: Moment


class Instant(NamedTuple):
    """One point of the allocation timeline."""

    moment: Moment
    total_bytes: int
    by_category: dict[str, int]


class StorageTracker(compat.TorchDispatchMode):
    """Enter it around what is to be observed; read `timeline`, `peak`, `highest` and `alive` afterwards."""

    def __init__(self, listeners: Iterable[Callable[..., None]] = ()) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.category: dict[int, str] = {}
        self.step, self.phase, self.where, self.op = "init", "init", "", ""
        self._listeners = tuple(listeners)
        self._serial = itertools.count()
        self._known: dict[int, int] = {}
        self._size: dict[int, int] = {}
        self._watchers: dict[int, Any] = {}
        self._born_in_hook = ""
        self._born_on_host = False
        self._offloads = False
        self._paused = 0
        self._region: int | None = None
        self._closing: list[int] = []
        self._models: list[nn.Module] = []
        self._stack: ExitStack | None = None

    # what is seen

    def __enter__(self) -> "StorageTracker":
        self._stack = ExitStack()
        self._stack.enter_context(compat.watch_fsdp(self.hook, self._before_fsdp))
        self._stack.enter_context(compat.watch_sharding_propagation(self.pause))
        self._stack.enter_context(compat.watch_resize(self._resized))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        assert self._stack is not None
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, compat.DTensor) for t in types):
            return NotImplemented
        if self._closing:
            self._close_regions()
        if self._paused:
            return func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in NAMESPACES:
            self.op = name
        if compat.engine_would_add_in_place(func, args, kwargs):
            func = torch.ops.aten.add_.Tensor
        out = args[0] if compat.waits_for_fake(func, args) else func(*args, **(kwargs or {}))
        for listener in self._listeners:
            listener(self, func, args, kwargs or {}, out)
        for tensor in _stored(out):
            self.see(tensor, seen_in=args if name not in BORN_AS_VIEWS else ())
        return out

    def see(self, tensor: Tensor, seen_in: Any = ()) -> int:
        """The serial number of a tensor's storage, which is known from now on; `seen_in` are the arguments that it may be a view of."""
        storage = tensor.untyped_storage()
        key = compat.storage_key(storage)
        serial = self._known.get(key)
        if serial is None:
            serial = next(self._serial)
            self._known[key] = serial
            self._watchers[serial] = weakref.finalize(storage, self._died, key, serial)
            self._watchers[serial].atexit = False
            if any(compat.storage_key(t.untyped_storage()) == key for t in compat.inner_tensors(seen_in)):
                self.category[serial] = LIBRARY
            elif self._born_on_host or self._offloads and self.phase in BY_HOST:
                self.category[serial] = ON_HOST["temporaries"]
            elif self._born_in_hook:
                self.category[serial] = "communication"
            self._grow(serial, storage.nbytes())
        elif storage.nbytes() != self._size[serial]:
            self._grow(serial, storage.nbytes() - self._size[serial])
        return serial

    def _grow(self, serial: int, delta: int) -> None:
        self._size[serial] = self._size.get(serial, 0) + delta
        if delta:
            self.events.append(Event(serial, delta, Moment(self.step, self.phase, self.where, self.op)))

    def _died(self, key: int, serial: int) -> None:
        if self._known.get(key) == serial:
            del self._known[key]
        self._watchers.pop(serial, None)
        self._grow(serial, -self._size[serial])

    def _resized(self, storage: torch.UntypedStorage) -> None:
        serial = self._known.get(compat.storage_key(storage))
        if serial is not None:
            self.op = "resize_"
            self._grow(serial, storage.nbytes() - self._size[serial])

    # where we are

    @contextmanager
    def hook(self, name: str) -> Iterator[None]:
        """Storages born inside are communication buffers (unless they turn out to be gradients)."""
        before, self._born_in_hook = self._born_in_hook, self._born_in_hook or name
        where, self.where = self.where, f"{self.where.split(' ')[0]} {name}".strip()
        try:
            yield
        finally:
            self._born_in_hook, self.where = before, where

    def offload(self) -> AbstractContextManager[Any]:
        """State is in host memory from now on: parameters, gradients and the optimizer's. Copies between the two are made, on fake tensors too, while the
        context lasts."""
        self._offloads = True
        return compat.watch_transfers(self._copied)

    @contextmanager
    def _copied(self, source: Tensor) -> Iterator[None]:
        """A copy of what is on the device is born in host memory, and the other way round."""
        here = next(compat.inner_tensors(source))
        self._born_on_host = self.category.get(self.see(here), "") not in ON_HOST.values()
        try:
            yield
        finally:
            self._born_on_host = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """See nothing inside."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def forward(self, phase: str = "forward") -> Iterator[None]:
        """A forward pass, or its repetition in backward: what outlives it was saved by autograd."""
        born, before = next(self._serial), (self.phase, self.where)
        self.phase = phase
        try:
            yield
        finally:
            self._closing.append(born)
            self.phase, self.where = before

    def recompute(self) -> "Any":
        """The region of a checkpoint's recompute (execute.checkpoint.Around)."""
        return self.forward("recompute")

    def _close_regions(self) -> None:
        for born in self._closing:
            for serial, size in self._size.items():
                if serial > born and size and serial not in self.category:
                    self.category[serial] = "activations"
        self._closing.clear()

    @contextmanager
    def phase_of(self, name: str) -> Iterator[None]:
        """A phase that is no forward: backward, clip, optimizer."""
        before, self.phase = (self.phase, self.where), name
        self.where = ""
        try:
            yield
        finally:
            self.phase, self.where = before

    # what became of it

    def label(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Give the storages of some tensors a category, unless one that comes first in ORDER holds them."""
        if self._offloads and category in STATES:
            category = ON_HOST[category]
        for tensor in _stored([t for t in tensors if t is not None]):
            serial = self.see(tensor)
            if serial not in self.category or ORDER.index(category) < ORDER.index(self.category[serial]):
                self.category[serial] = category

    def _before_fsdp(self, group: compat.FSDPParamGroup, name: str) -> None:
        """An unsharded gradient is a communication buffer: FSDP2 owns it until it is reduced."""
        if name == "post_backward" and not self._paused:
            for tensor in compat.inner_tensors(compat.unsharded_gradients(group)):
                self.category[self.see(tensor)] = "communication"

    def follow(self, model: nn.Module) -> None:
        """Keep `where` on the module at work, in forward by hooks on modules and in backward by hooks on their outputs."""
        self._models.append(model)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._entering(name), prepend=True)
            module.register_forward_hook(self._leaving(name))

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self.where = name
        return hook

    def _leaving(self, name: str) -> Any:
        def set_where(_: Any) -> None:
            self.where = name

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.where = name.rpartition(".")[0]
            if isinstance(output, Tensor) and output.requires_grad and output.grad_fn is not None:
                output.register_hook(set_where)
        return hook

    # readings

    def host(self, step: str) -> HostMemory | None:
        """What is offloaded: its highest sum in a step, and what is there now; None where nothing is."""
        names = {name: category for category, name in ON_HOST.items()}
        running: Counter[str] = Counter()
        best: Peak | None = None
        for event in self.events:
            category = names.get(self.category.get(event.storage, ""))
            if category is None:
                continue
            running[category] += event.delta
            if event.moment.step == step and (best is None or running.total() > best.total_bytes):
                best = Peak(running.total(), str(event.moment), _shown(running))
        return None if best is None else HostMemory(best, _shown(running))

    def alive(self) -> dict[str, int]:
        """Bytes alive now, by category."""
        self._close_regions()
        total: Counter[str] = Counter()
        for serial, size in self._size.items():
            total[self.category.get(serial, "temporaries")] += size
        return _shown(total)

    def timeline(self, step: str | None = None) -> list[Instant]:
        """The allocations of a step (all of them: None) in order: when, the total then, and its split."""
        running: Counter[str] = Counter()
        instants = []
        for event in self._on_device():
            running[self.category.get(event.storage, "temporaries")] += event.delta
            if step in (None, event.moment.step):
                instants.append(Instant(event.moment, running.total(), _shown(running)))
        return instants

    def peak(self, step: str, phases: tuple[str, ...] = ()) -> Peak | None:
        """The highest instant of a step, or of some of its phases."""
        running: Counter[str] = Counter()
        total, best = 0, -1
        best_split: dict[str, int] = {}
        best_moment: Moment | None = None
        for event in self._on_device():
            running[self.category.get(event.storage, "temporaries")] += event.delta
            total += event.delta
            if event.moment.step == step and (not phases or event.moment.phase in phases) and total > best:
                best, best_split, best_moment = total, dict(running), event.moment
        return None if best_moment is None else Peak(best, str(best_moment), _shown(best_split))

    def highest(self, step: str, category: str) -> int:
        """The largest sum of one category alone."""
        running = best = 0
        for event in self.events:
            if self.category.get(event.storage, "temporaries") == category:
                running += event.delta
            if event.moment.step == step:
                best = max(best, running)
        return best

    def _on_device(self) -> Iterator[Event]:
        return (e for e in self.events if self.category.get(e.storage) not in OUTSIDE)


def _stored(value: Any) -> Iterator[Tensor]:
    """The plain tensors inside a result that have memory: those of the meta device have a shape alone."""
    return (t for t in compat.inner_tensors(value) if not t.is_meta)


def _shown(split: dict[str, int] | Counter[str]) -> dict[str, int]:
    return {c: split[c] for c in CATEGORIES if split.get(c)}


@contextmanager
def steady_gc() -> Iterator[None]:
    """Collect cycles now and not inside: when a cycle dies must not depend on chance."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
