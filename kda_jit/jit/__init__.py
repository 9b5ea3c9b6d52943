"""The JIT layer: CUDA sources in kernels_src -> cubin in a disk cache -> kernel on a GPU.

Compiling needs neither a GPU nor torch; importing this needs neither CuPy nor a GPU.

    KernelSpec          what to build: file, entries, target, defines. Plain data
    compile_spec        spec -> Compiled (path, log, resources), through the disk cache
    compile_source      the same for a string or any file: for notebooks
    Compiled            .resources[entry]: registers, spills, stack, smem; .warnings; .binary
    Resources           one entry's figures, as ptxas prints them
    load                spec, device -> Module, once per device; never first in a graph capture
    Module, Kernel      .kernels[entry].launch(grid, block, smem, stream, args)
    reload              see edits to kernels_src from the next call on
    use_sources         take the kernels from another folder inside a `with` block, in this thread
    SourceTree          such a folder that remembers what was loaded from it
    Arch, arch_for      compute capability -> target; arch_named, TARGETS, PTX_TARGETS
    unavailable_reason  why nothing compiles here, or None; device_unavailable_reason likewise

In a notebook:

    built = jit.compile_source(Path("my_kernel.cu"), target="sm_90a", defines={"CHUNK": 32})
    print(built.resources, built.warnings)
    kernel = jit.load(built.spec).kernels["my_kernel"]
    kernel.launch((blocks, 1, 1), 128, 0, torch.cuda.current_stream().cuda_stream, args)

Files: arch, sources, spec < compiler (over cache) < driver, launch, module. The cache's own
functions (info, clear) are in `kda_jit.jit.cache`.
"""

from kda_jit.jit.arch import PTX_TARGETS, TARGETS, Arch, arch_for, arch_named, why_no_arch
from kda_jit.jit.compiler import (
    Compiled,
    Resources,
    compile_source,
    compile_spec,
    failed_spec,
    unavailable_reason,
)
from kda_jit.jit.launch import Kernel
from kda_jit.jit.module import (
    Module,
    SourceTree,
    device_unavailable_reason,
    is_loaded,
    load,
    reload,
    use_sources,
)
from kda_jit.jit.spec import KernelSpec

__all__ = [
    "PTX_TARGETS",
    "TARGETS",
    "Arch",
    "Compiled",
    "Kernel",
    "KernelSpec",
    "Module",
    "Resources",
    "SourceTree",
    "arch_for",
    "arch_named",
    "compile_source",
    "compile_spec",
    "device_unavailable_reason",
    "failed_spec",
    "is_loaded",
    "load",
    "reload",
    "unavailable_reason",
    "use_sources",
    "why_no_arch",
]
