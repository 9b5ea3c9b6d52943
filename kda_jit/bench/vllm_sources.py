"""Triton sources of vLLM, run as they are without vLLM: from a folder that its wheel was opened in.

    unzip vllm-0.33.0-*.whl 'vllm/models/*/nvidia/ops/third_party/kda/*.py' \\
        'vllm/model_executor/layers/mamba/ops/*_states.py' -d FOLDER

Importing vllm as a whole needs all that it depends on. A module of kernels needs a handful of names
from the rest; stand-ins for those are here, and a name that has none says so when it is called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_FLA = "vllm.third_party.flash_linear_attention.ops"
_WARMUP = "vllm.model_executor.warmup"


class _Stub(ModuleType):
    """A module of vLLM that is not here, as a package in `folder`."""

    def __init__(self, name: str, folder: Path, names: dict[str, Any]) -> None:
        super().__init__(name)
        self.__path__ = [str(folder)]
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        where = f"{self.__name__}.{name}"

        def absent(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{where} has no stand-in here")

        return absent


class _Platform:
    """vllm.platforms.current_platform, for NVIDIA."""

    @staticmethod
    def is_arch_support_pdl() -> bool:
        """Programmatic dependent launch."""
        return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def _dispatched(kernel: Any, warmup_inputs: object) -> Callable[..., Any]:
    """vLLM's decorator of a function that returns (grid, options): what then launches `kernel`."""

    def decorate(plan: Callable[..., tuple[Any, dict[str, Any]]]) -> Callable[..., None]:
        def launch(*tensors: torch.Tensor) -> None:
            grid, options = plan(*tensors)
            kernel[grid](*tensors, **options)

        return launch

    return decorate


def _stand_ins() -> dict[str, dict[str, Any]]:
    """By module, the names that kernels take from it."""
    import triton
    import triton.language as tl

    return {
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils.math_utils": {
            "cdiv": lambda a, b: -(-a // b),
            "next_power_of_2": triton.next_power_of_2,
            "RCP_LN2": 1.4426950408889634,
        },
        f"{_FLA}.op": {"exp": tl.exp, "exp2": tl.exp2, "log": tl.log},
        f"{_FLA}.utils": {"FLA_CHUNK_SIZE": 64, "is_amd": False},
        **{f"{_FLA}.{name}": {} for name in ("chunk_delta_h", "cumsum", "index", "l2norm")},
        f"{_FLA}.solve_tril": {},
        f"{_WARMUP}.jit_warmup": {},
        f"{_WARMUP}.jit_warmup_triton_helper": {
            "triton_kernel_dispatcher_with_warmup": _dispatched
        },
    }


def path_of(sources: Path, module: str) -> Path:
    """The file of a module of vLLM under the folder `sources`."""
    return sources.joinpath(*module.split(".")).with_suffix(".py")


def version(sources: Path, module: str) -> str:
    """What a report calls the source of a module."""
    digest = sha256(path_of(sources, module).read_bytes()).hexdigest()[:12]
    return f"{module}, sha256 {digest}"


def load(sources: Path, module: str) -> ModuleType:
    """The module, such as vllm.models.a.b, from its file; raises what its import raises."""
    package = module.rpartition(".")[0]
    folder = path_of(sources, module).parent
    with _vllm_replaced():
        for name, names in _stand_ins().items():
            sys.modules[name] = _Stub(name, folder, names)
        sys.modules[package] = _Stub(package, folder, {})
        return importlib.import_module(module)


@contextmanager
def _vllm_replaced() -> Iterator[None]:
    """Without vllm in sys.modules; afterwards it is as it was."""

    def take() -> dict[str, ModuleType]:
        names = [n for n in sys.modules if n.partition(".")[0] == "vllm"]
        return {name: sys.modules.pop(name) for name in names}

    before = take()
    try:
        yield
    finally:
        take()
        sys.modules.update(before)
