"""Makes one process's CPU look like several GPUs, so that every line under a CUDA condition runs.

`install` changes torch for the rest of the process, so call it in a process that a test has forked (`first`
of `runs.fork_workers`), never in pytest's process. Tensors are then on ``cuda:k``, with memory of the CPU.
Operations that a GPU refuses are refused: those that mix devices, NCCL for tensors of the host, gloo for
tensors of a GPU, pinning a tensor on a GPU, and reading it with numpy. Waits of the host, copies and
collectives are recorded.

There are no kernels, streams or memory of a GPU, so a test shows the operations and their order,
but not their speed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses import fake_tensor
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.nn.attention import SDPBackend
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

RECORD_VARIABLE = "PRETEND_CUDA_RECORD"
"""A folder to which a process writes its record when it ends."""
PRODUCT = Path(__file__).parents[2] / "trainkit"
NUM_GPUS = 4
GPU_NAME, CAPABILITY, GPU_BYTES = "NVIDIA H100 80GB HBM3", (9, 0), 80 * 2**30
CPU = torch.device("cpu")
PAGEABLE, PINNED = "pageable", "pinned"
"""Places of tensors on the host. The place of a tensor on a GPU is its device."""
PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""Operations on other kinds of tensors consist of operations on these kinds."""
FACTORIES = (
    *("empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "eye", "linspace"),
    *("scalar_tensor", "empty_strided", "from_numpy", "frombuffer"),
)
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select"}
"""Operations whose result the host needs."""
MIXES = {"copy_", "_foreach_copy_", "_to_copy", "to", "set_", "index", "index_put_", "_index_put_impl_"}
"""Operations that may have tensors of several devices."""

_base: Any = torch._C.TensorBase
_thread = threading.local()
notes: list[tuple[str, str]] = []
"""Recorded events in order, each with its thread."""
used: set[int] = set()
"""The GPUs on which a tensor was placed."""


def note(what: str) -> None:
    notes.append((what, threading.current_thread().name))


# The place of a tensor is an attribute of its storage, which all views share. The place is None if it is
# unknown, as for tensors that torch makes inside an operation.


def place_of(tensor: Tensor) -> Any:
    return getattr(tensor.untyped_storage(), "place", None)


def is_ours(value: object) -> bool:
    return type(value) in PLAIN and _base.device.__get__(value) == CPU


def put(found: Any, place: Any) -> Any:
    """Set the place of the tensors in a result, unless it is known or an operation is running."""
    if getattr(_thread, "in_kernel", False):
        return found
    for tensor in tensors_in((found,)):
        if place is not None and place_of(tensor) is None:
            tensor.untyped_storage().place = place  # type: ignore[attr-defined]
            used.update([place.index] if on_gpu(place) else [])
    return found


def tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if is_ours(value):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def on_gpu(place: Any) -> bool:
    return isinstance(place, torch.device)


def device_of(tensor: Tensor) -> torch.device:
    own: torch.device = _base.device.__get__(tensor)
    if not is_ours(tensor):
        local = getattr(tensor, "_local_tensor", getattr(tensor, "elem", None))
        return own if local is None or own != CPU else device_of(local)
    place = None if getattr(_thread, "in_kernel", False) else place_of(tensor)
    return place if on_gpu(place) else own


def gpu_of(device: Any) -> torch.device | None:
    """Return the GPU that an argument means, or None for the host and for no argument."""
    if device is None:
        return None
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda":
        return None
    return torch.device("cuda", current_device() if found.index is None else found.index)


@contextmanager
def results_at(place: Any) -> Iterator[None]:
    """Let the results of the operations in the block be at a place."""
    _thread.results_at = place
    try:
        yield
    finally:
        _thread.results_at = None


def note_copy(source: Any, target: Any, non_blocking: bool) -> None:
    """Record a copy between host and GPU. With pageable memory, the host always waits."""
    if source and target and on_gpu(source) != on_gpu(target):
        names = ["gpu" if on_gpu(place) else place for place in (source, target)]
        waits = not non_blocking or PAGEABLE in names
        note(f"copy {names[0]} to {names[1]}{', waits' if waits else ''}")


class PretendMode(TorchDispatchMode):
    """Handles every operation of a thread, also inside autograd and DTensor."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(issubclass(kind, fake_tensor.FakeTensor) for kind in types):
            return func(*args, **kwargs)
        if not all(kind in PLAIN for kind in types):
            return NotImplemented  # the operation consists of other operations
        if isinstance(func, HigherOrderOperator):  # attention that computes its mask
            return put(run_kernel(func, args, kwargs), self._shared_place([*tensors_in(args)]))
        name = func._schema.name.partition("::")[2]
        tensors = list(tensors_in((*args, *kwargs.values())))
        if func.namespace in ("c10d", "_c10d_functional"):
            note_collective(name, args, tensors)
            return put(run_kernel(func, args, kwargs), self._shared_place(tensors))
        place = gpu_of(kwargs.get("device"))
        if place is not None:
            kwargs["device"] = CPU
        if kwargs.pop("pin_memory", False):
            place = PINNED
        place = getattr(_thread, "results_at", None) or place
        if name not in MIXES:
            refuse_mixed(func, tensors)
        elif name == "copy_":
            note_copy(place_of(args[1]), place_of(args[0]), bool(args[2:] and args[2]))
        if name in WAITS and any(on_gpu(place_of(item)) for item in tensors):
            note(f"wait for {name}")
        return put(run_kernel(func, args, kwargs), place or self._shared_place(tensors))

    @staticmethod
    def _shared_place(tensors: list[Tensor]) -> Any:
        places = [place_of(item) for item in tensors]
        return next(filter(on_gpu, places), PAGEABLE if {PAGEABLE, PINNED} & set(places) else None)


def run_kernel(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation. Everything inside the operation is on the CPU.

    Some operations are written in Python.
    """
    _thread.in_kernel = True
    try:
        return KERNELS.get(func, func)(*args, **kwargs)
    finally:
        _thread.in_kernel = False


def refuse_mixed(func: Any, tensors: list[Tensor]) -> None:
    """Raise RuntimeError for operands on several devices.

    Scalars of the host may be mixed with any device.
    """
    found = {place_of(item) for item in tensors if item.dim()}
    if {PAGEABLE, PINNED} & found:
        found = found - {PAGEABLE, PINNED} | {CPU}
    if len(found - {None}) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device: {func} of {sorted(map(str, found))}"
        )


def note_collective(name: str, args: Any, tensors: list[Tensor]) -> None:
    """Record a collective with its backend.

    Raise RuntimeError if its group has no backend for the tensors.
    """
    group = next(filter(None, map(_group_of, args)), None)
    if group is None:
        return  # the collective waits for another one
    backend = backends.get(group.group_name, backends[""])
    is_gpu = {on_gpu(place_of(item)) for item in tensors}
    if name != "barrier" and not all(("nccl" if gpu else "gloo") in backend for gpu in is_gpu):
        where = ["GPUs" if gpu else "the host" for gpu in is_gpu]
        raise RuntimeError(f"No backend of {backend} for {name} of tensors on {' and '.join(where)}")
    note(f"{'nccl' if True in is_gpu else 'gloo'} {name}")


def _group_of(value: Any) -> dist.ProcessGroup | None:
    """Return the group in an argument of a collective, which has one of three forms."""
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        value = dist.ProcessGroup.unbox(value)
    if isinstance(value, str) and value not in REDUCTIONS:
        value = c10d._resolve_process_group(value)
    return value if isinstance(value, dist.ProcessGroup) else None


REDUCTIONS = {"sum", "avg", "max", "min", "product"}
backends: dict[str, str] = {}
"""Maps the name of each group to its backend. The world has the name ''."""


def _init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
    backends[""] = str(backend)
    _originals["init_process_group"](str(backend).replace("nccl", "gloo"), *args, **kwargs)


def _new_group(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
    gloo = None if backend is None else str(backend).replace("nccl", "gloo")
    group = _originals["new_group"](*args, backend=gloo, **kwargs)
    if backend is not None and isinstance(group, dist.ProcessGroup):
        backends[group.group_name] = str(backend)
    return group


_originals: dict[str, Any] = {}


# These methods and functions of torch return the place of a tensor, or move it.


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not is_ours(self):
        moved: Tensor = _base.to(self, *args, **kwargs)
        return moved
    copies = kwargs.pop("copy", False)
    if args and isinstance(args[0], Tensor):
        device, dtype, layout = device_of(args[0]), args[0].dtype, None
        non_blocking = kwargs.get("non_blocking", False)
    else:
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
    options = {"dtype": dtype or self.dtype, "non_blocking": non_blocking}
    if layout is not None:
        options["memory_format"] = layout
    if device is not None and device.type == "meta":
        return _base.to(self, device, **options)
    own, gpu = device_of(self), gpu_of(device)
    if device is None or own == (gpu or CPU):
        return _base.to(self, copy=copies, **options)
    # A copy to the host that does not wait arrives in pinned memory.
    place = gpu or (PINNED if non_blocking else PAGEABLE)
    note_copy(place_of(self) or PAGEABLE, place, non_blocking)
    with results_at(place):
        return _base.to(self, copy=True, **options)


def _pin_memory(self: Tensor, device: Any = None) -> Tensor:
    if device_of(self).type != "cpu":
        raise RuntimeError(f"cannot pin a tensor on {device_of(self)}: only dense CPU tensors can be pinned")
    note("pin_memory")
    with results_at(PINNED):
        return self.clone()


def _numpy(self: Tensor, **options: Any) -> Any:
    if device_of(self).type == "cuda":
        raise TypeError(f"can't convert {device_of(self)} device type tensor to numpy")
    return _base.numpy(self, **options)


def _tolist(self: Tensor) -> Any:
    if device_of(self).type == "cuda":
        note("wait for tolist")
    return _base.tolist(self)


def _storage_copy(self: Any, source: Any, non_blocking: bool | None = None) -> Any:
    place = PINNED if self.data_ptr() in _registered else getattr(self, "place", None)
    note_copy(getattr(source, "place", None), place or PAGEABLE, bool(non_blocking))
    with _disable_current_modes():  # the mode would treat the call as a copy of tensors
        return _originals["storage_copy"](self, source, non_blocking)


def _factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that makes a tensor. Without a device, the tensor is on the host."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        gpu = gpu_of(kwargs.get("device"))
        found = make(*args, **kwargs)
        return put(found, gpu or (PINNED if kwargs.get("pin_memory") else PAGEABLE))

    return made


def _from_values(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that makes a tensor from values, which are copied from the host."""

    @wraps(make)
    def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        gpu = gpu_of(device)
        if isinstance(args[0], Tensor) and make.__name__ == "as_tensor":
            return _to(args[0], device or device_of(args[0]), **kwargs)
        found = make(*args, **kwargs) if gpu or device is None else make(*args, device=device, **kwargs)
        if gpu is not None:
            note_copy(PAGEABLE, gpu, False)
        return put(found, gpu or (PINNED if pin_memory else PAGEABLE))

    return made


def _like(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that makes a tensor next to another one if no device is named."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        is_host = device is not None and not isinstance(device, int) and torch.device(device).type == "cpu"
        with results_at(PINNED if kwargs.get("pin_memory") else PAGEABLE) if is_host else nullcontext():
            return make(*args, **kwargs)

    return made


# These kernels do not exist on the CPU. In flash attention, the last query sees the last key.


def _flash_inputs(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the keys and values of every query head, and the mask."""
    keys, values = (item.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for item in (k, v))
    sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    mask = torch.zeros(sees.shape, dtype=q.dtype).masked_fill_(~sees, -torch.inf)
    return keys, values, mask if is_causal else None


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, is_causal: bool) -> Any:
    keys, values, mask = _flash_inputs(q, k, v, is_causal)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    nothing = q.new_empty(0)
    found = kernel(q, keys, values, dropout, False, attn_mask=mask)
    return *found, nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, scale: Any = None) -> Any:
    out, logsumexp, *_, dropout, is_causal, _, _ = args
    keys, values, mask = _flash_inputs(q, k, v, is_causal)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_q, *others = kernel(grad, q, keys, values, out, logsumexp, dropout, False, attn_mask=mask)
    return of_q, *(item.unflatten(1, (k.shape[1], -1)).sum(2) for item in others)


def _cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: None,
    has_logsumexp: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> Any:
    assert not is_causal or q.shape[2] == k.shape[2]
    out, logsumexp, *_ = _flash(q, k, v, dropout, is_causal)
    state = torch.tensor(0)
    return out, logsumexp[..., None], None, None, q.shape[2], k.shape[2], state, state, None


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any
) -> Any:
    return _flash_backward(grad, q, k, v, out, lse[..., 0], *args, None, None)


def _sdp_choice(*args: Any, enable_gqa: bool = False) -> int:
    """Return the choice of attention kernel on Hopper."""
    is_exact = torch.are_deterministic_algorithms_enabled()
    return (SDPBackend.FLASH_ATTENTION if is_exact else SDPBackend.CUDNN_ATTENTION).value


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return left.to(dtype) @ right.to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(total + _product(left, right, dtype))


KERNELS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.mm.dtype: _product,
    torch.ops.aten.addmm.dtype_out: _add_product,
    torch.ops.aten._scaled_dot_product_flash_attention.default: _flash,
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
}


# The following replaces the module `torch.cuda`.


class Stream:
    """A stream of the current GPU. Its work is done immediately."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.device = torch.device("cuda", current_device())
        self.device_index, self.device_type, self.stream_id = self.device.index, 1, id(self)
        self.cuda_stream = self.stream_id
        used.add(self.device_index)

    def synchronize(self) -> None:
        note("Stream.synchronize")

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        self._before = current_device()
        _thread.device = self.device_index  # the device is set for this thread, as in torch
        return self

    def __exit__(self, *error: object) -> None:
        _thread.device = self._before


class Event:
    def __init__(self, *args: Any, enable_timing: bool = False, **options: Any) -> None:
        self._is_timed = enable_timing
        self._recorded_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._recorded_s = time.perf_counter()

    def synchronize(self) -> None:
        assert self._recorded_s is not None, "nothing was recorded"
        note("Event.synchronize")

    def wait(self, stream: Stream | None = None) -> None: ...

    def elapsed_time(self, last: Event) -> float:
        assert self._is_timed, "the event was made without enable_timing"
        assert last._is_timed
        assert self._recorded_s is not None
        assert last._recorded_s is not None
        return 1e3 * (last._recorded_s - self._recorded_s)


def current_device() -> int:
    """Return the GPU of this thread, which is the first GPU until another one is set."""
    return getattr(_thread, "device", 0)


def set_device(device: Any) -> None:
    found = gpu_of(device)
    assert found.index < NUM_GPUS, f"CUDA error: invalid device ordinal {found.index}"
    _thread.device = found.index
    used.add(found.index)
    note(f"set_device {found.index}")


def _properties(device: Any = None) -> SimpleNamespace:
    gpu = gpu_of(current_device() if device is None else device)
    assert gpu is not None
    major, minor = CAPABILITY
    sizes = {"total_memory": GPU_BYTES, "major": major, "minor": minor, "multi_processor_count": 132}
    return SimpleNamespace(name=GPU_NAME, uuid=f"00000000-0000-0000-0000-{gpu.index:012}", **sizes)


_registered: set[int] = set()
"""Addresses of host memory that was pinned after its allocation."""


def _register(address: int, *rest: Any) -> int:
    _registered.add(address)
    return 0


def _unregister(address: int) -> int:
    _registered.discard(address)
    return 0


def _cuda() -> dict[str, Any]:
    streams: dict[int, Stream] = {}

    def current_stream(device: Any = None) -> Stream:
        if current_device() not in streams:
            streams[current_device()] = Stream()
        return streams[current_device()]

    return {
        **{"Stream": Stream, "Event": Event, "set_device": set_device, "current_device": current_device},
        **{"current_stream": current_stream, "default_stream": current_stream},
        **{"stream": lambda stream: stream or nullcontext()},
        **{"is_available": lambda: True, "device_count": lambda: NUM_GPUS, "_lazy_init": lambda: None},
        **{"init": lambda: None, "is_initialized": lambda: bool(used)},
        **{"get_device_properties": _properties, "get_device_name": lambda device=None: GPU_NAME},
        **{"get_device_capability": lambda device=None: CAPABILITY, "get_arch_list": lambda: ["sm_90"]},
        **{"is_bf16_supported": lambda *args, **options: True, "is_current_stream_capturing": lambda: False},
        **{"mem_get_info": lambda device=None: (GPU_BYTES, GPU_BYTES), "empty_cache": lambda: None},
        **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda device=None: 2**29),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda device=None: 2**30),
        **{"reset_peak_memory_stats": lambda device=None: None},
        "synchronize": lambda device=None: note("torch.cuda.synchronize"),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=_register, cudaHostUnregister=_unregister),
        **{"get_rng_state": lambda device=None: torch.get_rng_state()},
        **{"set_rng_state": lambda state, device=None: torch.set_rng_state(state)},
        "default_generators": tuple(torch.Generator() for _ in range(NUM_GPUS)),
    }


class _Autocast(torch.autocast):
    """Applies the autocast rules of the CPU, because its kernels run."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(device_type.replace("cuda", "cpu"), *args, **kwargs)


def _of_cpu(ask: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device_type="cpu": ask(device_type.replace("cuda", "cpu"))


def install() -> None:
    """Pretend from now on, also in all threads that start later."""
    _device._device_constructors()  # this call caches the current functions
    for name in FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name)))
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _from_values(getattr(torch, name)))
    for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint"):
        setattr(torch, f"{name}_like", _like(getattr(torch, f"{name}_like")))
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"):
        setattr(Tensor, name, _like(getattr(_base, name)))
    methods = {
        "device": property(device_of),
        "is_cuda": property(lambda self: device_of(self).type == "cuda"),
        "is_cpu": property(lambda self: device_of(self).type == "cpu"),
        "to": _to,
        "cpu": lambda self, **options: _to(self, "cpu", **options),
        "cuda": lambda self, device="cuda", **options: _to(self, device, **options),
        "pin_memory": _pin_memory,
        "is_pinned": lambda self, device=None: place_of(self) == PINNED,
        "numpy": _numpy,
        "tolist": _tolist,
        "record_stream": lambda self, stream: None,
        "_make_wrapper_subclass": staticmethod(_wrapper),
    }
    _originals["storage_copy"] = torch.UntypedStorage.copy_
    torch.UntypedStorage.copy_ = _storage_copy  # type: ignore[method-assign]
    for name, value in methods.items():
        setattr(Tensor, name, value)
    for name, value in _cuda().items():
        setattr(torch.cuda, name, value)
    accelerator = {
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "device_count": lambda: NUM_GPUS,
        "current_device_index": current_device,
        "set_device_index": set_device,
        "current_stream": torch.cuda.current_stream,
        "synchronize": lambda device=None: note("torch.accelerator.synchronize"),
    }
    for name, value in accelerator.items():
        setattr(torch.accelerator, name, value)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        setattr(torch, name, _of_cpu(getattr(torch, name)))
    torch.Stream, torch.Event, torch.autocast = Stream, Event, _Autocast  # type: ignore[misc, assignment]
    torch._fused_sdp_choice = _sdp_choice
    torch.version.cuda = "13.0"
    fake_tensor.init_gpu_context = lambda device: None
    # Without kernels, only operators can be recorded.
    cpu = [torch.profiler.ProfilerActivity.CPU]
    _originals["profile"] = torch.profiler.profile
    torch.profiler.profile = lambda activities, **options: _originals["profile"](activities=cpu, **options)  # type: ignore[assignment, misc]
    memory: Any = torch.cuda.memory
    memory._record_memory_history = lambda enabled: note(f"record memory history {enabled}")
    memory._dump_snapshot = lambda file: Path(file).touch()
    _originals["init_process_group"], _originals["new_group"] = c10d.init_process_group, c10d.new_group
    c10d.init_process_group = dist.init_process_group = _init_process_group
    c10d.new_group = dist.new_group = device_mesh.new_group = _new_group
    _group_by_device()
    _pretend_in_threads()
    PretendMode().__enter__()
    if RECORD_VARIABLE in os.environ:
        _record_at_exit(Path(os.environ[RECORD_VARIABLE]))


def _wrapper(*args: Any, **kwargs: Any) -> Any:
    if gpu_of(kwargs.get("device")) is not None:
        kwargs["device"] = CPU
    return _base._make_wrapper_subclass(*args, **kwargs)


def _group_by_device() -> None:
    """Let torch's optimizers, which group tensors by device, find their tensors on the GPUs."""
    kind: Any = torch.optim.Optimizer
    group = kind._group_tensors_by_device_and_dtype

    def grouped(lists: Any, with_indices: bool = False) -> Any:
        found = group(lists, with_indices)
        return {(device_of(value[0][0][0]), key[1]): value for key, value in found.items()}

    kind._group_tensors_by_device_and_dtype = staticmethod(grouped)


def _pretend_in_threads() -> None:
    run = threading.Thread.run

    def run_pretending(thread: threading.Thread) -> None:
        with PretendMode():
            run(thread)

    threading.Thread.run = run_pretending  # type: ignore[method-assign]


# The following code writes the record of a process.


def _record_at_exit(folder: Path) -> None:
    """Trace the lines of trainkit, and write them with the events when the process ends."""
    lines: set[tuple[str, int]] = set()
    root, leave, own = f"{PRODUCT}{os.sep}", os._exit, os.getpid()

    def of_line(frame: FrameType, event: str, value: Any) -> Any:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return of_line

    def of_call(frame: FrameType, event: str, value: Any) -> Any:
        return of_line if frame.f_code.co_filename.startswith(root) else None

    def write_and_leave(code: int) -> None:
        if os.getpid() != own:
            leave(code)  # a forked worker inherits the events of this process
        sys.settrace(None)
        found = sorted((name.removeprefix(root), number) for name, number in set(lines))
        file = folder / f"rank-{os.environ.get('RANK', '0')}.json"
        file.write_text(json.dumps({"notes": notes, "lines": found, "used": sorted(used)}))
        leave(code)

    sys.settrace(of_call)
    threading.settrace(of_call)
    os._exit = write_and_leave  # type: ignore[assignment]
