"""The layer core: one step of an engine, from its five inputs to its output and its pool of states.

It decides once, when it is built, which backend runs and how much memory the largest step needs.
What a step holds is in :mod:`kda_jit.step`; docs/layer.md shows the calls of an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from kda_jit.api import prefill
from kda_jit.backends.base import LaunchRecord, Query, device_capability, last_launch
from kda_jit.contract.checks import (
    check_grad,
    check_lower_bound,
    check_parameter,
    check_place,
    check_scale,
    check_state,
    check_tokens,
)
from kda_jit.contract.memory import address_range, check_aliasing
from kda_jit.contract.words import refuse_device, refuse_dtype, refuse_shape
from kda_jit.errors import DeviceError, InputError, InputTypeError, OutputConflictError
from kda_jit.pack import Group, PackInputs, pack, scatter, triton_can_pack
from kda_jit.recurrent import recurrent
from kda_jit.resolver import rejections, resolve
from kda_jit.step import (
    Limits,
    Part,
    Sequences,
    StepMetadata,
    StepPlan,
    check_each_row_once,
    check_host_contents,
    check_limits,
    check_sequences,
    decodes_pay_apart,
    packed_rows,
    plan_step,
)
from kda_jit.workspace import (
    Spec,
    Workspace,
    WorkspaceLanes,
    current_stream,
    is_capturing,
    planned_bytes,
    workspace_specs,
)

#: Key of ``additional_config`` that names the backend.
BACKEND_KEY = "kda_prefill_backend"
_CALLER = "KDACore"
#: Sets of packed views that a layer remembers, before starting over.
MAX_VIEWS = 64


class StepRecord(NamedTuple):
    """What a step ran: how its outputs were written, and its launches in order."""

    route: Literal["none", "direct", "scatter"]
    launches: tuple[LaunchRecord, ...] = ()

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(kernel for launch in self.launches for kernel in launch.kernels)


class KDACore:
    """Kimi Delta Attention as a layer of an engine runs it, for the heads of this rank.

    num_heads               H, of q and k, on this rank
    head_dim                K, and V unless value_head_dim says otherwise
    lower_bound             of the gate, in [-5, 0); None: the unbounded gate
    max_num_batched_tokens  tokens of the largest step
    max_num_seqs            sequences of the largest step, speculative ones included
    num_spec                drafts of a speculative sequence at most; 0: no speculative steps
    dtype                   of q, k, v and the output; of g and beta too unless g_dtype, beta_dtype
    state_dtype             of the pool, fp32 or bf16
    device                  None: the current GPU, or the CPU where there is none
    backend                 "auto", "cuda" (alias "flashkda"), "triton" or "torch". What "auto" is
                            additional_config["kda_prefill_backend"] may say, else the environment
                            variable KDA_JIT_BACKEND; else it is the first that can. A backend that
                            is named and cannot run is an error here.
    num_value_heads         HV, on this rank; None: H
    scale                   None: K ** -0.5
    checkpoints             whether steps may save states inside sequences
    decodes_apart           whether decodes beside prefills go to the recurrent kernel; None: where
                            that pays (`kda_jit.step.decodes_pay_apart`). With True, a decode has
                            the same bits whatever it is batched with.
    workspace               memory shared with other layers: that of another core, or one built over
                            `specs` or larger ones. None: allocated here, in `lanes` lanes.
    lanes                   steps in flight at once, on several streams or as micro-batches, each in
                            memory of its own

    Raises what is wrong with any of these now, and not in a step.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        lower_bound: float | None,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        num_spec: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        additional_config: Mapping[str, object] | None = None,
        num_value_heads: int | None = None,
        workspace: Workspace | WorkspaceLanes | None = None,
        *,
        backend: str = "auto",
        value_head_dim: int | None = None,
        g_dtype: torch.dtype | None = None,
        beta_dtype: torch.dtype | None = None,
        scale: float | None = None,
        checkpoints: bool = True,
        decodes_apart: bool | None = None,
        lanes: int = 1,
    ) -> None:
        specs = self.specs(
            num_heads, head_dim, max_num_batched_tokens, max_num_seqs, num_spec, dtype,
            num_value_heads, value_head_dim=value_head_dim, g_dtype=g_dtype, beta_dtype=beta_dtype,
            checkpoints=checkpoints,
        )  # fmt: skip
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise InputTypeError(
                f"state_dtype: expected torch.float32 or torch.bfloat16, got {state_dtype}."
            )
        self.num_heads, self.num_value_heads = num_heads, num_value_heads or num_heads
        self.head_dim, self.value_head_dim = head_dim, value_head_dim or head_dim
        self.lower_bound = None if lower_bound is None else check_lower_bound(lower_bound)
        self.scale = head_dim**-0.5 if scale is None else check_scale(scale)
        self.dtype, self.state_dtype = dtype, state_dtype
        self.g_dtype, self.beta_dtype = g_dtype or dtype, beta_dtype or dtype
        self.limits = Limits(max_num_batched_tokens, max_num_seqs, num_spec)
        self.device = check_place(device)
        self._index = -1 if self.device.index is None else self.device.index
        self._checkpoints = checkpoints
        self._decodes_apart = decodes_apart
        #: What makes two layers plan a step alike.
        self._kind = (
            self.limits, self.num_value_heads, self.head_dim, self.value_head_dim, self.device,
            checkpoints, decodes_apart,
        )  # fmt: skip
        self._views: dict[tuple[int, int], tuple[PackInputs, Tensor]] = {}

        query = Query(
            K=self.head_dim, V=self.value_head_dim, dtype=dtype, lower_bound=self.lower_bound,
            device=self.device, capability=device_capability(self.device),
            g_dtype=g_dtype, beta_dtype=beta_dtype,
        )  # fmt: skip
        self.resolution = resolve(query, *_asked(backend, additional_config))
        self.backend = self.resolution.backend
        # There is no recurrent kernel but Triton's and torch's.
        triton = self.backend != "torch" and not rejections("triton", query)
        self.recurrent_backend = "triton" if triton else "torch"
        self._triton = self.backend != "torch" and triton_can_pack(self.device)
        self._sm_count = (
            torch.cuda.get_device_properties(self.device).multi_processor_count
            if self.device.type == "cuda"
            else 0
        )

        if workspace is None:
            # Allocated under inference_mode, it could not be written outside of it.
            with torch.inference_mode(False):
                workspace = WorkspaceLanes(specs, self.device, lanes)
        elif lanes != 1:
            raise InputError(
                f"lanes: expected 1 along with a workspace, which has its own, got {lanes}."
            )
        elif not isinstance(workspace, Workspace | WorkspaceLanes):
            raise InputTypeError(
                "workspace: expected a kda_jit.Workspace, WorkspaceLanes or None, got "
                f"{type(workspace).__name__}."
            )
        elif workspace.device not in (None, self.device):
            raise DeviceError(
                f"workspace: expected one on {self.device}, got one on {workspace.device}."
            )
        # Another plan may be smaller than this layer's; it says so now.
        workspace.reserve({name: spec.nbytes for name, spec in specs.items()}, caller=_CALLER)
        self.workspace = workspace

    # -- the plan, known before a layer is built -------------------------------------------------

    @staticmethod
    def specs(
        num_heads: int,
        head_dim: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        num_spec: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        num_value_heads: int | None = None,
        *,
        value_head_dim: int | None = None,
        g_dtype: torch.dtype | None = None,
        beta_dtype: torch.dtype | None = None,
        checkpoints: bool = True,
    ) -> dict[str, Spec]:
        """Regions that a layer of these sizes needs, by name: the plan of a shared workspace."""
        H, HV = num_heads, num_heads if num_value_heads is None else num_value_heads
        K, V = head_dim, head_dim if value_head_dim is None else value_head_dim
        for name, value, least in (
            ("num_heads", H, 1), ("num_value_heads", HV, 1), ("head_dim", K, 1),
            ("value_head_dim", V, 1), ("num_spec", num_spec, 0),
        ):  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, int):
                kind = type(value).__name__
                raise InputTypeError(f"{name}: expected an int, got {kind} {value!r}.")
            if value < least:
                raise InputError(f"{name}: expected at least {least}, got {value}.")
        if HV % H:
            raise InputError(
                f"num_value_heads: expected a multiple of num_heads = {H}, got {HV}. Each q/k head "
                "serves HV / H value heads."
            )
        regions = workspace_specs(
            max_num_batched_tokens, max_num_seqs, HV, max(K, V), dtype=dtype,
            checkpoints=checkpoints,
        )  # fmt: skip
        regions["layer_start_loc"] = Spec((max_num_seqs + 1,), torch.int64)
        rows = Limits(max_num_batched_tokens, max_num_seqs, num_spec).packed_rows
        if rows:
            regions["layer_q"] = regions["layer_k"] = Spec((rows, H, K), dtype)
            regions["layer_v"] = regions["layer_out"] = Spec((rows, HV, V), dtype)
            regions["layer_g"] = Spec((rows, HV, K), g_dtype or dtype)
            regions["layer_beta"] = Spec((rows, HV), beta_dtype or dtype)
        return regions

    @staticmethod
    def planned_bytes(
        num_heads: int,
        head_dim: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        num_spec: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        num_value_heads: int | None = None,
        *,
        value_head_dim: int | None = None,
        g_dtype: torch.dtype | None = None,
        beta_dtype: torch.dtype | None = None,
        checkpoints: bool = True,
        lanes: int = 1,
    ) -> int:
        """Bytes that a layer of these sizes allocates when it is built without a workspace."""
        regions = KDACore.specs(
            num_heads, head_dim, max_num_batched_tokens, max_num_seqs, num_spec, dtype,
            num_value_heads, value_head_dim=value_head_dim, g_dtype=g_dtype,
            beta_dtype=beta_dtype, checkpoints=checkpoints,
        )  # fmt: skip
        return lanes * planned_bytes(regions)

    # -- a step ----------------------------------------------------------------------------------

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        state_pool: Tensor,
        metadata: StepMetadata,
        core_attn_out: Tensor,
        *,
        lane: int = 0,
    ) -> StepRecord:
        """Runs one step: writes core_attn_out and the slots of the pool that the step names.

        q, k [1, T, H, K], v [1, T, HV, V], g [1, T, HV, K], beta [1, T, HV]
                       as for `kda_jit.prefill`; T is at least num_actual_tokens, rows from there on
                       are padding, which is not read
        A_log, dt_bias [HV], [HV, K] or [HV * K], fp32
        state_pool     [slots, HV, V, K] in state_dtype; updated in place
        metadata       what the step holds
        core_attn_out  [1, T, HV, V] in dtype, maybe token-strided: written, but not at or past
                       num_actual_tokens, nor in rows that belong to no sequence
        lane           which of the planned lanes the step uses

        All errors of :func:`kda_jit.prefill` are raised here too, for too large a step a
        WorkspaceError: before anything is launched or written. Returns what ran.
        """
        index = self._index
        plan, s = self._plan(metadata)
        x, out = self._check_tokens(q, k, v, g, beta, core_attn_out, metadata, index)
        self._check_parameters(A_log, dt_bias, index)
        shape = (0, self.num_value_heads, self.value_head_dim, self.head_dim)
        check_state("state_pool", state_pool, None, shape, index, True)
        if state_pool.dtype is not self.state_dtype:
            refuse_dtype("state_pool", state_pool, (self.state_dtype,), "As the layer was built.")
        step = _Step(s, A_log, dt_bias, state_pool)
        if torch.is_grad_enabled() or self.device.type == "cpu":
            self._check_slowly(metadata, plan, step, x, out)
        if plan.route == "none":
            return StepRecord("none")
        workspace = self.workspace.lane(lane, caller=_CALLER)
        if self.device.type != "cuda" or torch.cuda.current_device() == index:
            return self._run(plan, step, x, out, workspace)
        with torch.cuda.device(self.device):
            return self._run(plan, step, x, out, workspace)

    __call__ = forward

    def _plan(self, m: StepMetadata) -> tuple[StepPlan, Sequences]:
        """How the step is divided; worked out by the first of the layers that see its metadata."""
        if isinstance(m, StepMetadata):
            known: tuple[StepPlan, Sequences] | None = m.memo.get(self._kind)
            if known is not None:
                return known
        check_limits(m, self.limits)
        s = check_sequences(
            m, (self.num_value_heads, self.value_head_dim, self.head_dim), self._index
        )
        if s.checkpoint_state is not None and not self._checkpoints:
            raise InputError(
                "checkpoint_state: expected None, since the layer was built with "
                "checkpoints=False, got a tensor."
            )
        apart = self._decodes_apart
        if apart is None:
            apart = decodes_pay_apart(m.num_decodes, self.num_value_heads, self._sm_count)
        rows = packed_rows(m, s)
        plan = plan_step(m.num_decodes, m.num_prefills, m.num_spec_decodes, rows, apart)
        check_each_row_once(plan)
        m.memo[self._kind] = plan, s
        return plan, s

    def _run(
        self, plan: StepPlan, step: _Step, x: PackInputs, out: Tensor, workspace: Workspace
    ) -> StepRecord:
        """With the layer's device current."""
        workspace.acquire(self.device, current_stream(self.device), is_capturing())
        try:
            run = self._run_parts if plan.route == "direct" else self._run_packed
            return StepRecord(plan.route, tuple(run(plan, step, x, out, workspace)))
        finally:
            workspace.release()

    def _run_packed(
        self, plan: StepPlan, step: _Step, inputs: PackInputs, out: Tensor, workspace: Workspace
    ) -> list[LaunchRecord]:
        """Both groups: packed, run on the packed rows, and put back in the order of the tokens."""
        s = step.sequences
        assert s.token_indx is not None and s.start_loc is not None
        assert s.spec_token_indx is not None and s.spec_start_loc is not None
        _check_output_apart(out, inputs, step.state_pool)
        packed, packed_out = self._packed_views(workspace, sum(plan.rows))
        groups = (
            Group(s.token_indx, s.start_loc, plan.rows[0]),
            Group(s.spec_token_indx, s.spec_start_loc, plan.rows[1]),
        )
        launches = [pack(inputs, packed, *groups, triton=self._triton)]
        launches += self._run_parts(plan, step, packed, packed_out, workspace)
        launches.append(scatter(packed_out, out, *groups, triton=self._triton))
        return launches

    def _packed_views(self, workspace: Workspace, rows: int) -> tuple[PackInputs, Tensor]:
        """That many rows of the packed buffers; making six views takes longer than a launch."""
        key = (workspace.address("layer_q", 0, caller=_CALLER), rows)
        found = self._views.get(key)
        if found is None:
            H, HV, K, V = self.num_heads, self.num_value_heads, self.head_dim, self.value_head_dim

            def view(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
                return workspace.view(f"layer_{name}", (1, rows, *shape), dtype, caller=_CALLER)

            with torch.inference_mode(False):  # views made under it could only be written under it
                inputs = PackInputs(
                    view("q", (H, K), self.dtype),
                    view("k", (H, K), self.dtype),
                    view("v", (HV, V), self.dtype),
                    view("g", (HV, K), self.g_dtype),
                    view("beta", (HV,), self.beta_dtype),
                )
                found = inputs, view("out", (HV, V), self.dtype)
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            self._views[key] = found
        return found

    def _run_parts(
        self, plan: StepPlan, step: _Step, inputs: PackInputs, target: Tensor, workspace: Workspace
    ) -> list[LaunchRecord]:
        """Every part of the plan, over its rows of the inputs and of the target."""
        launches: list[LaunchRecord] = []
        for part in plan.parts:
            rows = inputs.rows(part.first_row, part.end_row)
            out = _cut(target, part.first_row, part.end_row, 1)
            if part.kind == "prefill":
                got = self._prefill(part, step, rows, out, workspace)
            else:
                got = self._recurrent(part, step, rows, out)
            if got.data_ptr() != out.data_ptr():
                raise OutputConflictError(
                    f"{part.kind}: expected its output in the rows given to it, got another "
                    "tensor. What was written there is not the step's output."
                )
            record = last_launch()
            assert record is not None
            launches.append(record)
        return launches

    def _prefill(
        self, part: Part, step: _Step, x: PackInputs, out: Tensor, workspace: Workspace
    ) -> Tensor:
        s, first, end = step.sequences, part.first, part.end
        assert s.start_loc is not None and s.state_indices is not None
        start_loc = _cut(s.start_loc, first, end + 1)
        if part.first_row:  # starts of this part's rows, and not of the group's
            shifted = workspace.view(
                "layer_start_loc", tuple(start_loc.shape), start_loc.dtype, caller=_CALLER
            )
            start_loc = torch.sub(start_loc, part.first_row, out=shifted)
        return prefill(
            *x,
            A_log=step.A_log,
            dt_bias=step.dt_bias,
            lower_bound=self.lower_bound,
            scale=self.scale,
            initial_state=step.state_pool,
            cu_seqlens=start_loc,
            out=out,
            state_indices=_cut(s.state_indices, first, end),
            has_initial_state=_cut(s.has_initial_state, first, end),
            checkpoint_state=_cut(s.checkpoint_state, first, end),
            checkpoint_offsets=_cut(s.checkpoint_offsets, first, end),
            workspace=workspace,
            backend=self.backend,
        )[0]

    def _recurrent(self, part: Part, step: _Step, x: PackInputs, out: Tensor) -> Tensor:
        s, first, end = step.sequences, part.first, part.end
        if part.kind == "speculative":
            start_loc, slots, accepted, has = (
                s.spec_start_loc, s.spec_state_indices, s.num_accepted_tokens, None,
            )  # fmt: skip
        else:
            start_loc, slots, accepted, has = (
                s.start_loc, s.state_indices, None, s.has_initial_state,
            )  # fmt: skip
        assert start_loc is not None and slots is not None
        return recurrent(
            *x,
            A_log=step.A_log,
            dt_bias=step.dt_bias,
            lower_bound=self.lower_bound,
            scale=self.scale,
            state_pool=step.state_pool,
            state_indices=_cut(slots, first, end),
            num_accepted_tokens=accepted,
            has_initial_state=_cut(has, first, end),
            cu_seqlens=_cut(start_loc, first, end + 1),
            out=out,
            backend=self.recurrent_backend,
        )

    # -- checks ----------------------------------------------------------------------------------

    def _check_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        core_attn_out: Tensor,
        m: StepMetadata,
        index: int,
    ) -> tuple[PackInputs, Tensor]:
        """The inputs and the output, cut to the step's tokens."""
        T, H, HV = m.num_actual_tokens, self.num_heads, self.num_value_heads
        K, V = self.head_dim, self.value_head_dim
        cut = []
        for name, x, shape, dtype, axes in (
            ("q", q, (1, T, H, K), self.dtype, "[1, T, H, K]"),
            ("k", k, (1, T, H, K), self.dtype, "[1, T, H, K]"),
            ("v", v, (1, T, HV, V), self.dtype, "[1, T, HV, V]"),
            ("g", g, (1, T, HV, K), self.g_dtype, "[1, T, HV, K]"),
            ("beta", beta, (1, T, HV), self.beta_dtype, "[1, T, HV]"),
            ("core_attn_out", core_attn_out, (1, T, HV, V), self.dtype, "[1, T, HV, V]"),
        ):
            if not isinstance(x, Tensor) or x.dim() != len(shape):
                refuse_shape(name, x, axes, shape)
            live = x if x.shape[1] == T else x[:, :T]
            check_tokens(name, live, shape, axes, index, name == "core_attn_out")
            if live.dtype is not dtype:
                refuse_dtype(name, live, (dtype,), "As the layer was built.")
            cut.append(live)
        return PackInputs(*cut[:5]), cut[5]

    def _check_slowly(
        self, m: StepMetadata, plan: StepPlan, step: _Step, x: PackInputs, out: Tensor
    ) -> None:
        """What an engine on a GPU, under inference_mode, need not pay for."""
        named = x._asdict() | {
            "A_log": step.A_log, "dt_bias": step.dt_bias, "state_pool": step.state_pool,
            "core_attn_out": out,
        }  # fmt: skip
        if torch.is_grad_enabled():
            check_grad(tuple(named), tuple(named.values()))
        if self.device.type == "cpu":
            # Other devices without an index, such as "meta", look like the CPU to get_device().
            for name, y in (named | step.sequences._asdict()).items():
                if y is not None and not y.is_cpu:
                    refuse_device(name, y, -1)
            check_host_contents(m, step.sequences, plan.rows, step.state_pool)

    def _check_parameters(self, A_log: Tensor, dt_bias: Tensor, index: int) -> None:
        HV, K = self.num_value_heads, self.head_dim
        if not isinstance(A_log, Tensor) or A_log.numel() != HV:
            refuse_shape("A_log", A_log, "[HV]", (HV,), "It holds one number per value head.")
        if not isinstance(dt_bias, Tensor) or dt_bias.shape not in ((HV * K,), (HV, K)):
            refuse_shape("dt_bias", dt_bias, "[HV, K] or [HV * K]", (HV, K))
        check_parameter("A_log", A_log, index)
        check_parameter("dt_bias", dt_bias, index)


class _Step(NamedTuple):
    """What the parts of a step share."""

    sequences: Sequences
    A_log: Tensor
    dt_bias: Tensor
    state_pool: Tensor


def _asked(backend: str, additional_config: Mapping[str, object] | None) -> tuple[str, str]:
    """(the backend asked for, what to call that in an error). The resolver judges it."""
    if backend == "auto" and additional_config is not None and BACKEND_KEY in additional_config:
        # Maybe no str; then the resolver says so.
        asked: str = additional_config[BACKEND_KEY]  # type: ignore[assignment]
        return asked, f'additional_config["{BACKEND_KEY}"]'
    return backend, "backend"


_MaybeTensor = TypeVar("_MaybeTensor", Tensor, Tensor | None)


def _cut(x: _MaybeTensor, first: int, end: int, axis: int = 0) -> _MaybeTensor:
    """x[first:end] along an axis; x itself where that is all of it, which saves making a view."""
    if x is None or (first == 0 and end == x.shape[axis]):
        return x
    return x.narrow(axis, first, end - first)


def _check_output_apart(out: Tensor, inputs: PackInputs, pool: Tensor) -> None:
    """core_attn_out shares no element with what the step reads, or with the pool."""
    start, end = address_range(out)
    for x in (*inputs, pool):
        other_start, other_end = address_range(x)
        if other_start < end and start < other_end:
            check_aliasing({"core_attn_out": out}, {**inputs._asdict(), "state_pool": pool})
