"""Other implementations of the same operator, if they are here. None is needed, none is installed.

FlashKDA's library comes inside vLLM's wheel (vllm/_flashkda_C.abi3.so); name it in the environment.
The others are taken if they import, and only when asked for: fla, which tunes itself on first use
of a head count, for tens of seconds; FlashKDA's own package, flash_kda; and cuLA.

A peer has a name, says why it does not run here (`why_not`) and which kinds of call its adapter
lacks (`lacks`, in the words of kda_jit.testing), and binds inputs to a call without arguments.
"""

from __future__ import annotations

import importlib
import sys
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda_jit import settings
from kda_jit.errors import InputError
from kda_jit.testing import Inputs

from .subject import Call

#: What no adapter has: kinds of call that its package lacks, or makes in another way.
LACKED = ("unbounded", "bf16_state", "padding", "buffers", "pool", "checkpoint", "graph")


class FlashKDA:
    """vLLM's build of FlashKDA: bf16, K = V = 128, bounded gate, HV = H, packed."""

    name = "flashkda"
    lacks = (*LACKED, "dense", "grouped", "strided")

    def __init__(self, path: Path | None = None) -> None:
        """path: of the library; None: where the environment says."""
        self.path = path.expanduser() if path else settings.flashkda_so()

    def activate(self) -> None:
        pass

    @property
    def version(self) -> str:
        return f"{self.path.name}, {self.path.stat().st_size} bytes" if self.path else ""

    def why_not(self) -> str | None:
        """Why it cannot run here; None if it can."""
        if self.path is None:
            return f"{settings.FLASHKDA_SO.name} is not set"
        if not self.path.is_file():
            return f"there is no {self.path}"
        try:
            return None if self.ops.fwd else "the library has no operator fwd"
        except (OSError, AttributeError) as error:
            return f"{self.path} does not load: {error}"

    @cached_property
    def ops(self) -> Any:
        """Its operators: fwd and get_workspace_size."""
        assert self.path is not None
        torch.ops.load_library(str(self.path.resolve()))
        return torch.ops._flashkda_C

    def workspace(self, tokens: int, heads: int, sequences: int, device: torch.device) -> Tensor:
        """Scratch memory of a call of that size."""
        nbytes = self.ops.get_workspace_size(tokens, heads, sequences)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def bind(self, inputs: Inputs) -> Call:
        x, fwd = inputs, self.ops.fwd
        assert x.cu_seqlens is not None
        assert x.lower_bound is not None
        T, H, D = x.q.shape[1:]
        out = torch.full_like(x.v, torch.nan)
        final = torch.full((x.N, H, D, D), torch.nan, device=x.q.device)
        initial = torch.zeros_like(final) if x.initial_state is None else x.initial_state
        workspace = self.workspace(T, H, x.N, x.q.device)
        scale = D**-0.5 if x.scale is None else x.scale
        A_log, dt_bias = x.A_log.view(-1), x.dt_bias.view(H, D)

        def call() -> tuple[Tensor, Tensor]:
            fwd(
                *x.args, scale, out, workspace, A_log, dt_bias, x.lower_bound, initial, final,
                x.cu_seqlens, None, None,
            )  # fmt: skip
            return out, final

        return call


class _Package:
    """An installed package: there if its module imports."""

    name: str
    module: str

    def activate(self) -> None:
        pass

    @property
    def version(self) -> str:
        """As installed, else what the module says of itself."""
        try:
            return f"{self.name} {metadata.version(self.name)}"
        except metadata.PackageNotFoundError:
            module = importlib.import_module(self.name)
            return f"{self.name} {getattr(module, '__version__', 'of unknown version')}"

    def why_not(self) -> str | None:
        """Why it cannot run here; None if it can."""
        try:
            importlib.import_module(self.module)
        except ImportError as error:
            return f"{self.module} does not import: {error}"
        return None


class Fla(_Package):
    """fla's chunk_kda, with gate, l2norm and the sigmoid of beta in its kernels.

    tuned  its kernels time all their configurations on first use, which takes minutes for many head
           counts; else each takes its first one: for who asks what they compute, not how fast. Once
           one has run untuned, so do all in that process
    """

    name, module = "fla", "fla.ops.kda"
    lacks = LACKED
    _untuned = False  # in this process

    def __init__(self, tuned: bool = True):
        self.tuned = tuned

    def activate(self) -> None:
        if not self.tuned and not Fla._untuned:
            importlib.import_module(self.module)
            take_first_configurations(self.name)
            Fla._untuned = True

    @property
    def version(self) -> str:
        first = not self.tuned or Fla._untuned
        untuned = ", first configuration of each kernel" if first else ""
        for package in ("fla-core", "flash-linear-attention"):
            try:
                return f"{package} {metadata.version(package)}{untuned}"
            except metadata.PackageNotFoundError:
                continue
        return super().version + untuned

    def bind(self, inputs: Inputs) -> Call:
        chunk_kda = importlib.import_module(self.module).chunk_kda
        x = inputs
        cu_seqlens = None if x.cu_seqlens is None else x.cu_seqlens.long()
        lengths = None if cu_seqlens is None else cu_seqlens.cpu()
        dt_bias = x.dt_bias.flatten()

        @torch.inference_mode()
        def call() -> tuple[Tensor, Tensor]:
            out, final = chunk_kda(
                *x.args,
                scale=x.scale,
                initial_state=x.initial_state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                safe_gate=True,
                lower_bound=x.lower_bound,
                state_v_first=True,
                cu_seqlens=cu_seqlens,
                cu_seqlens_cpu=lengths,
                A_log=x.A_log,
                dt_bias=dt_bias,
            )
            return out, final

        return call


class FlashKDAPackage(_Package):
    """FlashKDA as its authors give it, the package flash_kda: bf16, K = V = 128, HV = H."""

    name = module = "flash_kda"
    lacks = (*LACKED, "grouped", "strided")

    def bind(self, inputs: Inputs) -> Call:
        fwd = importlib.import_module(self.module).fwd
        x = inputs
        H, D = x.q.shape[2:]
        out = torch.full_like(x.v, torch.nan)
        final = torch.full((x.N, H, D, D), torch.nan, device=x.q.device)
        scale = D**-0.5 if x.scale is None else x.scale
        A_log, dt_bias = x.A_log.view(-1), x.dt_bias.view(H, D)
        cu_seqlens = None if x.cu_seqlens is None else x.cu_seqlens.long()

        def call() -> tuple[Tensor, Tensor]:
            fwd(
                *x.args, scale, out, A_log, dt_bias, x.lower_bound,
                initial_state=x.initial_state, final_state=final, cu_seqlens=cu_seqlens,
            )  # fmt: skip
            return out, final

        return call


class Cula(_Package):
    """cuLA's fused prefill for the GPU at hand; beta is activated before, its states are [V, K]."""

    name, module = "cula", "cula.utils"
    lacks = (*LACKED, "grouped")

    def why_not(self) -> str | None:
        if error := super().why_not():
            return error
        try:
            importlib.import_module(self.module).get_kda_fused_fwd()
        except (ImportError, NotImplementedError, RuntimeError) as error:
            return f"cuLA has no prefill for this GPU: {error}"
        return None

    def bind(self, inputs: Inputs) -> Call:
        prefill = importlib.import_module(self.module).get_kda_fused_fwd(inputs.q.device)
        x = inputs
        cu_seqlens = None if x.cu_seqlens is None else x.cu_seqlens.int()
        dt_bias = x.dt_bias.flatten()

        @torch.inference_mode()
        def call() -> tuple[Tensor, Tensor]:
            out, final = prefill(
                q=x.q,
                k=x.k,
                v=x.v,
                g=x.g,
                beta=x.beta.float().sigmoid(),
                scale=x.scale,
                initial_state=x.initial_state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                safe_gate=True,
                lower_bound=x.lower_bound,
                cu_seqlens=cu_seqlens,
                A_log=x.A_log,
                dt_bias=dt_bias,
            )
            return out, final

        return call


def take_first_configurations(package: str) -> int:
    """Leaves each tuned Triton kernel of a package one configuration; returns their number.

    For the rest of the process.
    """
    from triton.runtime.autotuner import Autotuner, Heuristics

    modules = [m for name, m in list(sys.modules.items()) if f"{name}.".startswith(f"{package}.")]
    layers = (Autotuner, Heuristics)  # one around the other, and the kernel inside
    found = [x for module in modules for x in vars(module).values() if isinstance(x, layers)]
    tuned = 0
    for kernel in {id(x): x for x in found}.values():
        while isinstance(kernel, layers):
            if isinstance(kernel, Autotuner):
                kernel.configs = list(kernel.configs[:1])
                tuned += 1
            kernel = kernel.fn
    return tuned


Peer = FlashKDA | Fla | FlashKDAPackage | Cula
#: What `--peer` takes.
PEERS = tuple(peer.name for peer in (FlashKDA, Fla, FlashKDAPackage, Cula))


def find_peers(
    asked: list[str] | None, library: Path | None = None, tuned: bool = True
) -> list[Peer]:
    """The peers to measure against: those asked for, which must run, else FlashKDA if it is here.

    library: FlashKDA's; None: where the environment says.  tuned: see Fla.
    """
    peers: tuple[Peer, ...] = (FlashKDA(library), Fla(tuned), FlashKDAPackage(), Cula())
    known = {peer.name: peer for peer in peers}
    if asked is None:
        return [known["flashkda"]] if known["flashkda"].why_not() is None else []
    for name in asked:
        if reason := known[name].why_not():
            raise InputError(f"peer: expected one that runs here, got {name!r}: {reason}.")
    return [known[name] for name in asked]
