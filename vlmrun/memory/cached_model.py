"""A model whose layers come and go by plan.

Two kinds of entry share one protocol: any module whose layers are known is loaded in part,
anything else as a whole. Nobody touches a module except inside `use`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from vlmrun.memory.plan import Plan
from vlmrun.memory.streaming import Slot, buffer_bytes, read_layer, tensors_of
from vlmrun.models.checkpoints.reading import WeightReader, torch_dtype
from vlmrun.models.family import Phase
from vlmrun.models.layer import Layer
from vlmrun.models.model import Model


class CachedModel(Protocol):
    """What a cache needs of an entry, whichever kind it is."""

    @property
    def compute_device(self) -> torch.device: ...

    @property
    def resident_bytes(self) -> int: ...

    @property
    def wanted_bytes(self) -> int:
        """The most that `resident_bytes` can become while the entry is in use."""

    @property
    def peak_vram_bytes(self) -> int:
        """The most the allocator has reserved on the device; 0 on the CPU."""

    @property
    def bytes_read(self) -> int:
        """Bytes of weights read from files so far, mapped ones not among them."""

    def shrink(self, nbytes: int) -> int:
        """Give back at least `nbytes` of weights where that many are held; returns how many."""

    def close(self) -> None: ...


class CachedModelWithPartialLoad:
    """Binds layers to the module when they run, keeps those resident that the plan keeps.

    The module is built on meta and never holds a weight of its own: a parameter points at
    prepared storage while its layer is bound, and back at meta when it is released.
    """

    def __init__(self, module: nn.Module, model: Model, plan: Plan, reader: WeightReader) -> None:
        self.plan = plan
        self.compute_device = torch.device(plan.storage.device)
        self.reader = reader
        self._module = module
        self._model = model
        self._dtype = plan.storage.dtype
        self._layers = {p.layer.name: p.layer for p in plan.placements if not p.layer.gathered}
        self._stored: dict[str, dict[str, Tensor]] = {}  # layers that stay, in RAM or VRAM
        self._given_back: set[str] = set()  # layers that `shrink` took; they stream
        self._meta: dict[str, dict[str, Tensor | None]] = {}
        self._bound: dict[str, int] = {}
        self._slot: Slot | None = None
        self._phase: Phase | None = None
        self._attach()

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights that stay, mapped ones included."""
        return sum(map(nbytes_of, self._stored.values()))

    @property
    def wanted_bytes(self) -> int:
        """Bytes of the weights that stay in the phase that keeps most of them."""
        return max(
            sum(p.nbytes for p in self.plan.placements if p.layer.name in self._kept(phase))
            for phase in self.plan.workload.phases
        )

    @property
    def peak_vram_bytes(self) -> int:
        return peak_reserved(self.compute_device)

    @property
    def bytes_read(self) -> int:
        return self.reader.bytes_read

    @contextmanager
    def use(self, phase: Phase) -> Iterator[nn.Module]:
        """Bring in what stays during a phase, send away what does not, and lend the module."""
        if phase != self._phase:
            self._enter(phase)
        yield self._module

    @contextmanager
    def bound(self, name: str) -> Iterator[nn.Module]:
        """Lend the module of one layer, bound while several calls use it: all crops in one
        crossing, or a parameter that no forward of its own reads."""
        layer = self._layers[name]
        try:
            self._bind(layer)
            yield self._module.get_submodule(layer.module)
        finally:
            self._release(layer)

    def shrink(self, nbytes: int) -> int:
        """Give layers back, last ones first; they are read from disk from then on."""
        freed = 0
        for name in reversed(self._stored):
            if freed >= nbytes:
                break
            freed += nbytes_of(self._stored[name])
            self._given_back.add(name)
        for name in self._given_back & self._stored.keys():
            self._drop(name)
        return freed

    def close(self) -> None:
        for name in list(self._stored):
            self._drop(name)
        self._slot = None
        self.reader.close()

    def _attach(self) -> None:
        """Remember the meta parameters and bind around every layer's forward."""
        for layer in self._layers.values():
            unbound = dict.fromkeys(path for path, _, _ in tensors_of(layer, self._dtype))
            weights = {w.path: self._module.get_parameter(w.path) for w in layer.weights}
            self._meta[layer.name] = unbound | weights
            if not layer.module:
                continue
            runner = self._module.get_submodule(layer.module)
            runner.register_forward_pre_hook(lambda _m, _a, layer=layer: self._bind(layer))
            runner.register_forward_hook(
                lambda _m, _a, _o, layer=layer: self._release(layer), always_call=True
            )

    def _enter(self, phase: Phase) -> None:
        self._phase = None  # until all of it is in; reading may fail
        keep = self._kept(phase)
        for name in self._stored.keys() - keep:
            self._drop(name)
        for name, layer in self._layers.items():
            if name in keep and name not in self._stored:
                self._store(layer, on_device=name in self.plan.resident(phase))
        self._phase = phase

    def _kept(self, phase: Phase) -> frozenset[str]:
        """Names of the layers that lie in memory throughout a phase."""
        return (self.plan.resident(phase) | self.plan.held(phase)) - self._given_back

    def _store(self, layer: Layer, *, on_device: bool) -> None:
        """Load a layer that stays: mapped where the whole model is and the dtype is the
        file's, else read into memory of its own."""
        device = self.compute_device if on_device else torch.device("cpu")
        maps = self.plan.all_resident and self.compute_device.type == "cpu"
        tensors = self._mapped(layer) if maps else None
        if tensors is None:
            buffer = torch.empty(buffer_bytes(layer, self._dtype), dtype=torch.uint8)
            tensors = read_layer(layer, buffer, self._dtype, self._model.checkpoint, self.reader)
        self._stored[layer.name] = moved(tensors, device)
        if device == self.compute_device:
            self._point(self._stored[layer.name])

    def _mapped(self, layer: Layer) -> dict[str, Tensor] | None:
        tensors = {}
        for weight in layer.weights:
            if weight.columns is not None:  # a view of columns is not contiguous
                return None
            info = self._model.checkpoint.tensors[weight.key]
            tensor = self.reader.map(info, name=weight.key, rows=weight.rows)
            if tensor is None or tensor.dtype != torch_dtype(weight.kept(self._dtype)):
                return None
            tensors[weight.path] = tensor.view(weight.shape)
        return tensors

    def _drop(self, name: str) -> None:
        del self._stored[name]
        self._point(self._meta[name])

    def _bind(self, layer: Layer) -> None:
        """Point a layer's parameters at its weights on the compute device."""
        self._bound[layer.name] = self._bound.get(layer.name, 0) + 1
        if self._bound[layer.name] > 1:
            return
        tensors = self._stored.get(layer.name)
        if tensors is None:
            tensors = self._read(layer)
        elif device_of(tensors) == self.compute_device:
            return
        self._point(moved(tensors, self.compute_device))

    def _release(self, layer: Layer) -> None:
        self._bound[layer.name] -= 1
        if self._bound[layer.name]:
            return
        tensors = self._stored.get(layer.name)
        if tensors is None and self._slot is not None:
            self._slot.free()
        if tensors is None or device_of(tensors) != self.compute_device:
            self._point(self._meta[layer.name])

    def _read(self, layer: Layer) -> dict[str, Tensor]:
        if self._slot is None:
            self._slot = Slot(
                max(buffer_bytes(each, self._dtype) for each in self._layers.values()),
                dtype=self._dtype,
                checkpoint=self._model.checkpoint,
                reader=self.reader,
            )
        return self._slot.read(layer)

    def _point(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Set weights as parameters, the scales of quantised ones as plain attributes."""
        for path, tensor in tensors.items():
            owner, _, name = path.rpartition(".")
            if tensor is not None and name != "scale" and not isinstance(tensor, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=False)
            setattr(self._module.get_submodule(owner), name, tensor)


def nbytes_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def moved(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {path: tensor.to(device) for path, tensor in tensors.items()}


def device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """Where a layer lies: all of it in one place."""
    return next(iter(tensors.values())).device


class CachedModelOnlyFullLoad:
    """A model that is opaque to the cache: loaded as a whole, unloaded as a whole."""

    def __init__(self, load: Callable[[], nn.Module], *, nbytes: int, device: str) -> None:
        self.compute_device = torch.device(device)
        self.nbytes = nbytes
        self._load = load
        self._module: nn.Module | None = None

    @property
    def resident_bytes(self) -> int:
        return 0 if self._module is None else self.nbytes

    @property
    def wanted_bytes(self) -> int:
        return self.nbytes

    @property
    def peak_vram_bytes(self) -> int:
        return peak_reserved(self.compute_device)

    @property
    def bytes_read(self) -> int:
        return 0 if self._module is None else self.nbytes

    @contextmanager
    def use(self) -> Iterator[nn.Module]:
        """Load the model where it is not, and lend it."""
        if self._module is None:
            self._module = self._load()
        yield self._module

    def shrink(self, nbytes: int) -> int:
        """Unload the whole model, however little is asked for."""
        freed = self.resident_bytes if nbytes > 0 else 0
        if freed:
            self._module = None
        return freed

    def close(self) -> None:
        self._module = None


def peak_reserved(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.cuda.max_memory_reserved(device)
