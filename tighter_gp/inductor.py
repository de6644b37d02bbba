"""A recorded step as machine code for the processor, in a fraction of the time that :func:`torch.compile` takes.

The record has no Python left in it, so it goes to torch's Inductor as it is. Inductor keeps what it made on disk, for the
next process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .checks import first_line

Flat = Callable[..., Sequence[Tensor]]

log = logging.getLogger("tighter_gp")

# Where most of the time went: the C++ compiler was started once per kernel, after headers that take as long as the rest,
# and after six programs that try what the processor says it can do. A compiler that cannot is found out by the step's own.
_OPTIONS = {"cpp_wrapper": True, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}

# They tell of a save that nobody asked for, and of operations that are called by way of Python.
_TALKATIVE = ("torch._inductor.ir", "torch._inductor.standalone_compile")


def compile_recorded(graph: GraphModule, inputs: Sequence[Tensor], options: dict[str, Any]) -> Flat:
    """A function of tensors from its record: by Inductor itself on a CPU, else, or where that fails, by ``torch.compile``.

    :param graph: The record, of ATen's operations on contiguous tensors.
    :param inputs: Tensors of the shapes that it will be called with.
    :param options: Of :func:`torch.compile`, which is called if there are any.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> graph = make_fx(lambda x: (x + 1,))(torch.ones(2))
        >>> tighter_gp.inductor.compile_recorded(graph, [torch.ones(2)], {"backend": "eager"})(torch.ones(2))
        (tensor([2., 2.]),)
    """
    if not options and all(tensor.device.type == "cpu" for tensor in inputs):
        try:
            with _unprobed_processor(), _quiet():
                direct = torch._inductor.standalone_compile(
                    graph, list(inputs), dynamic_shapes="from_example_inputs", options={"config_patches": _OPTIONS}
                )
                direct(*inputs)
            return direct
        except Exception as error:
            log.debug("Inductor did not take the step as it is, torch.compile is asked: %s", first_line(error))
    compiled = torch.compile(graph, **{"fullgraph": True, "dynamic": False, **options})
    compiled(*inputs)
    return compiled


@contextmanager
def _unprobed_processor() -> Iterator[None]:
    """What was believed of the processor without a try is forgotten: others may want one."""
    from torch._inductor import cpu_vec_isa

    tries: list[Any] = [type(isa).__bool__ for isa in cpu_vec_isa.supported_vec_isa_list]
    kept = [function for function in (cpu_vec_isa.valid_vec_isa_list, *tries) if hasattr(function, "cache_info")]
    empty = [function for function in kept if not function.cache_info().currsize]
    try:
        yield
    finally:
        for function in empty:
            function.cache_clear()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings that are none of the user's."""

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING

    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    for logger in loggers:
        logger.addFilter(is_error)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_error)
