"""The stand-in for a GPU: ``torch.device("dev")``, two of them, with memory of the CPU and the manners of CUDA.

``load()`` builds it once, keeps it in the user's cache and registers it. It has to happen before the first backward pass
of a process, which starts one thread per device: the tests' ``conftest`` does it as soon as a selected test needs one.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

SOURCE = Path(__file__).with_name("device.cpp")
PACKAGE = Path(__file__).parents[2] / "tighter_gp"
DEVICES = ("dev:0", "dev:1")


def missing() -> str | None:
    """Why the stand-in cannot be built here, or None."""
    if os.name != "posix":
        return "the stand-in device is built with g++ on Linux"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13):
        return f"the stand-in device speaks to torch from 2.13 on, this is {torch.__version__}"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "no Python.h, which the stand-in device is built with"
    compiler = os.environ.get("CXX", "c++")
    for program in (compiler, "ninja"):
        beside = Path(sys.executable).with_name(program)
        if shutil.which(program) is None and not beside.exists():
            return f"no {program}, which the stand-in device is built with"
    return None


def _directory() -> Path:
    """One per version of torch, of Python and of the source."""
    name = "\n".join([torch.__version__, sys.version, SOURCE.name, SOURCE.read_text()])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "tighter_gp" / f"device-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


@functools.cache
def load() -> Any:
    """Build the extension unless another process has, and register the device; raises RuntimeError where it cannot."""
    import fcntl

    reason = missing()
    if reason is not None:
        raise RuntimeError(reason)
    from torch.utils import cpp_extension

    directory = _directory()
    directory.mkdir(parents=True, exist_ok=True)
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += os.pathsep + beside  # where pip puts ninja
    with open(directory / "building", "w") as lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fcntl.flock(lock, fcntl.LOCK_EX)
        # From a copy beside it: ninja would build again for every checkout that the source is in.
        source = directory / SOURCE.name
        if not source.exists():
            shutil.copyfile(SOURCE, source)
        extension = cpp_extension.load(
            "tighter_gp_device", [str(source)], build_directory=str(directory), extra_cflags=["-O1", "-g0", "-w"]
        )
    extension.start()
    torch.utils.rename_privateuse1_backend("dev")
    torch._register_device_module("dev", _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return extension


def _module(extension: Any) -> types.ModuleType:
    """``torch.dev``, with what torch asks of a device."""
    module: Any = types.ModuleType("torch.dev")
    generators = tuple(extension.default_generator(i) for i in range(len(DEVICES)))

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def index(device: Any) -> int:
        found = torch.device(device).index if isinstance(device, (str, torch.device)) else device
        return extension.current_device() if found is None else found

    @contextmanager
    def device(new: Any) -> Iterator[None]:
        before = extension.current_device()
        extension.set_device(index(new))
        try:
            yield
        finally:
            extension.set_device(before)

    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: len(DEVICES)
    module.current_device = extension.current_device
    module.set_device = lambda new: extension.set_device(index(new))
    module.device = device
    module.synchronize = lambda device=None: None
    module.default_generators = generators
    module.manual_seed = lambda seed: generators[extension.current_device()].manual_seed(seed)
    module.manual_seed_all = manual_seed_all
    module.get_rng_state = lambda device="dev": generators[index(device)].get_state()
    module.set_rng_state = lambda state, device="dev": generators[index(device)].set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.is_autocast_enabled = lambda: torch.is_autocast_enabled("dev")
    module.set_autocast_enabled = lambda on: torch.set_autocast_enabled("dev", on)
    module.get_autocast_dtype = lambda: torch.get_autocast_dtype("dev")
    module.set_autocast_dtype = lambda dtype: torch.set_autocast_dtype("dev", dtype)
    return module


# -- who made the host wait ----------------------------------------------------------------------------------------------


class Wait(NamedTuple):
    """One synchronisation: the operator, and the line of the package (else of its caller) that asked for it."""

    what: str
    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """File and function, which stay when lines move."""
        return f"{self.file} {self.function}" if self.line else self.file


def where(skip: tuple[str, ...] = ("checks.py",)) -> tuple[str, int, str]:
    """File, line and function: the innermost frame of the package, else the innermost outside of torch."""
    frame: Any = sys._getframe(1)
    outside = None
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if PACKAGE in file.parents:
            if file.name not in skip:
                return str(file.relative_to(PACKAGE)), frame.f_lineno, frame.f_code.co_name
        elif outside is None and "torch" not in file.parts and Path(__file__) != file:
            outside = (_short(file), frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return outside or ("backward pass", 0, "")


def _short(file: Path) -> str:
    parts = file.parts
    return "/".join(parts[parts.index("site-packages") + 1 :] if "site-packages" in parts else parts[-2:])


@contextmanager
def waits() -> Iterator[list[Wait]]:
    """Collects what would make the host wait for a GPU."""
    extension = load()
    found: list[Wait] = []
    extension.listen(lambda what: found.append(Wait(what, *where())))
    try:
        yield found
    finally:
        extension.listen(None)


@contextmanager
def synchronisations(device: str) -> Iterator[list[Any]]:
    """The same on a GPU, where torch warns of them."""
    if not device.startswith("cuda"):
        with waits() as found:
            yield found
        return
    collected: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield collected
        finally:
            torch.cuda.set_sync_debug_mode("default")
            collected.extend(str(w.message) for w in caught if "synchroniz" in str(w.message))
