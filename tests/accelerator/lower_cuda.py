"""Lower captured training steps for a GPU that is not there: ``make lower-cuda``.

The steps of T-SVGP, SOLVE-GP and softmax are recorded by :class:`tighter_gp.CompiledStep` on the CPU, put on fake tensors of
``cuda:0`` and handed to Inductor, which is told of an A100 (sm_80). Each Triton kernel that it writes is compiled to machine
code by Triton for that target; nothing is run. It needs torch's CUDA wheel, which brings Triton and ptxas: ``pip install
torch``, gigabytes, into an environment of its own.

It patches private names of torch; where they have moved, it says which one is missing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

TARGET = 80
STEPS = ("T-SVGP", "T-SOLVE-GP", "softmax, optimal")
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA A100-SXM4-40GB", major=8, minor=0, multi_processor_count=108, warp_size=32, total_memory=40 << 30,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
    shared_memory_per_block_optin=166912, shared_memory_per_multiprocessor=167936, gcnArchName="", L2_cache_size=40 << 20,
)  # fmt: skip


def obstacle() -> str | None:
    """Why this cannot be done here, or None."""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} was built without CUDA. Install its CUDA wheel, gigabytes, into an environment of its "
            "own: pip install torch."
        )
    if importlib.util.find_spec("triton") is None:
        return "There is no triton, which comes with torch's CUDA wheel."
    return None


def captured(name: str) -> tuple[Any, list[Tensor]]:
    """The graph of a step, forward and backward, and its inputs, on the CPU."""
    import tighter_gp
    from tests.accelerator import launches

    found: list[tuple[Any, list[Tensor]]] = []

    def keep(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        found.append((graph, list(inputs)))
        return graph.forward

    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    step = launches.STEPS[name]()
    step.backward()
    compiled = tighter_gp.CompiledStep(step.module, backend=keep)
    compiled(*step.data)
    if not found:
        raise RuntimeError(f"The step of {name} was not captured; the warnings above say why.")
    return found[0]


def on_cuda(graph: Any, inputs: list[Tensor]) -> tuple[Any, list[Tensor]]:
    """The same graph with every device argument and every input on a fake ``cuda:0``."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    device = torch.device("cuda", 0)
    for node in graph.graph.nodes:
        node.kwargs = {key: device if isinstance(value, torch.device) else value for key, value in node.kwargs.items()}
    graph.recompile()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in inputs]
        for constant in [name for name, _ in graph.named_buffers(recurse=False)]:
            value = getattr(graph, constant)
            setattr(graph, constant, torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device))
        return make_fx(graph, decomposition_table=select_decomp_table(), tracing_mode="real")(*fake), fake


@contextlib.contextmanager
def pretended_gpu() -> Iterator[list[tuple[str, str]]]:
    """Inductor believes in one A100; the list collects the names and sources of its Triton kernels."""
    from torch._inductor.async_compile import AsyncCompile
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    kernels: list[tuple[str, str]] = []

    def keep(self: Any, name: str, source: str, *args: Any, **kwargs: Any) -> Callable[..., None]:
        kernels.append((name, source))
        return lambda *args, **kwargs: None

    target = GPUTarget("cuda", TARGET, 32)
    active = types.SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device=0: 0
    )
    patches = [
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=1),
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch("torch.cuda.get_device_properties", return_value=PROPERTIES),
        mock.patch("torch.cuda._get_device_properties", return_value=PROPERTIES, create=True),
        mock.patch("torch.cuda.get_device_capability", return_value=(TARGET // 10, TARGET % 10)),
        mock.patch("torch.cuda._lazy_init", return_value=None),
        mock.patch("torch._inductor.scheduler.has_triton", return_value=True),
        mock.patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu", return_value=None),
        mock.patch("torch.cuda._exchange_device", return_value=0),
        mock.patch("torch.cuda._maybe_exchange_device", return_value=0),
        mock.patch("torch.cuda.get_rng_state", torch.get_rng_state),
        mock.patch("torch.cuda.set_rng_state", return_value=None),
        mock.patch.object(AsyncCompile, "triton", keep),
        mock.patch.object(driver, "_active", active, create=True),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield kernels


def lower(name: str) -> list[tuple[str, str]]:
    """The Triton kernels of a step, by name and source."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    graph, inputs = captured(name)
    with pretended_gpu() as kernels, config.patch(compile_threads=1, fx_graph_cache=False, fallback_random=True):
        lowered, fake = on_cuda(graph, inputs)
        compile_fx_inner(lowered, fake)
    return kernels


def compiles(name: str, source: str) -> str | None:
    """Compile one kernel for the target; the error, or None."""
    from torch._inductor.codecache import PyCodeCache

    try:
        with pretended_gpu():
            getattr(PyCodeCache.load(source), name).precompile(warm_cache_only=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def main() -> int:
    reason = obstacle()
    if reason is not None:
        print(f"Nothing was lowered. {reason}")
        return 2
    failures = 0
    for name in STEPS:
        kernels = lower(name)
        errors = {kernel: error for kernel, source in kernels if (error := compiles(kernel, source)) is not None}
        print(f"{name}: {len(kernels) - len(errors)} of {len(kernels)} Triton kernels compiled for sm_{TARGET}")
        for kernel, error in errors.items():
            print(f"  {kernel}: {error}")
        failures += len(errors)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
