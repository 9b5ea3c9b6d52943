"""An engine plays against the layer: whatever it does, each request gets its own recurrence.

Every step is checked by `kda_jit.testing.serving`; this decides what the steps are.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kda_jit import KDACore, WorkspaceLanes
from kda_jit.reference import recurrent_kda
from kda_jit.testing.numeric import assert_close
from kda_jit.testing.serving import Engine, Request, Work

MAX_REQUESTS = 5
HEADS = {"num_heads": 1, "head_dim": 8, "num_value_heads": 2, "value_head_dim": 12}
MEMORY: list[torch.Tensor] = []


def poisoned(nbytes: int, device: torch.device) -> torch.Tensor:
    """Workspace memory that the machine can fill with NaN before every step."""
    MEMORY.append(torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device))
    return MEMORY[-1]


@lru_cache
def core_of(num_spec: int, decodes_apart: bool, state_dtype: torch.dtype) -> KDACore:
    sizes = {"max_num_batched_tokens": 256, "max_num_seqs": 12, "num_spec": num_spec}
    specs = KDACore.specs(**HEADS, **sizes, dtype=torch.float32)
    return KDACore(
        **HEADS,
        **sizes,
        lower_bound=-5.0,
        dtype=torch.float32,
        state_dtype=state_dtype,
        device="cpu",
        backend="torch",
        decodes_apart=decodes_apart,
        workspace=WorkspaceLanes(specs, "cpu", 2, poisoned),
    )


ANYTHING = "anything"
PROMPTS = st.sampled_from([1, 2, 15, 16, 17, 33, 40])
OPTIONS = st.fixed_dictionaries(
    {
        "padding": st.sampled_from([0, 1, 7]),
        "idle_rows": st.sampled_from([0, 0, 3]),
        "idle_sequences": st.sampled_from([0, 0, 2]),
        "strided": st.booleans(),
        "index_dtype": st.sampled_from([torch.int32, torch.int64]),
        "lane": st.sampled_from([0, 1]),
    }
)


class Serving(RuleBasedStateMachine):
    """On the torch backend; a subclass may serve with another layer."""

    @staticmethod
    def build(num_spec: int, decodes_apart: bool, state_dtype: torch.dtype) -> KDACore:
        return core_of(num_spec, decodes_apart, state_dtype)

    @staticmethod
    def limit(state_dtype: torch.dtype) -> float:
        return 1e-4 if state_dtype == torch.float32 else 3e-2

    @initialize(
        num_spec=st.sampled_from([1, 3]),
        decodes_apart=st.booleans(),
        state_dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
        seed=st.integers(0, 99),
        prompts=st.lists(PROMPTS, min_size=1, max_size=3),
    )
    def start(
        self,
        num_spec: int,
        decodes_apart: bool,
        state_dtype: torch.dtype,
        seed: int,
        prompts: list[int],
    ) -> None:
        core = self.build(num_spec, decodes_apart, state_dtype)
        self.tolerance = self.limit(state_dtype)
        self.engine = Engine(core, slots=4 * (1 + num_spec), seed=seed, limit=self.tolerance)
        self.requests: list[Request] = [self.engine.add(prompt) for prompt in prompts]
        self.rounded = state_dtype != torch.float32

    @precondition(lambda self: self.engine.has_room and len(self.requests) < MAX_REQUESTS)
    @rule(prompt=PROMPTS)
    def new_request(self, prompt: int) -> None:
        self.requests.append(self.engine.add(prompt))

    @precondition(lambda self: self.admitted())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Its slots go to others, and what it wrote there stays."""
        self.engine.preempt(data.draw(st.sampled_from(self.admitted())))

    @precondition(lambda self: self.engine.has_room and any(not r.slots for r in self.requests))
    @rule(data=st.data())
    def readmit(self, data: st.DataObject) -> None:
        self.engine.readmit(data.draw(st.sampled_from([r for r in self.requests if not r.slots])))

    @precondition(lambda self: self.engine.has_room and any(r.checkpoints for r in self.requests))
    @rule(data=st.data(), tokens=st.integers(1, 20))
    def resume_from_checkpoint(self, data: st.DataObject, tokens: int) -> None:
        """Takes the place of the oldest request if there are too many."""
        source = data.draw(st.sampled_from([r for r in self.requests if r.checkpoints]))
        saved = data.draw(st.integers(0, len(source.checkpoints) - 1))
        self.requests.append(self.engine.resume(source, saved, tokens))
        if len(self.requests) > MAX_REQUESTS:
            self.finish(self.requests.pop(0))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish_request(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.finish(request)

    def finish(self, request: Request) -> None:
        self.compare_from_scratch(request)
        if request.slots:
            self.engine.preempt(request)

    @precondition(lambda self: self.admitted())
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Each request does something that it can do, or nothing; the order is anything."""
        self.run(data, [(r, ANYTHING) for r in self.admitted()])

    @precondition(lambda self: len({r.pending == 0 for r in self.admitted()}) == 2)
    @rule(data=st.data())
    def mixed_step(self, data: st.DataObject) -> None:
        """Some requests are verified or decoded beside others that are prefilled."""
        self.run(data, [(r, "prefill" if r.pending else ANYTHING) for r in self.admitted()])

    @precondition(lambda self: any(r.pending < 2 for r in self.admitted()))
    @rule(data=st.data())
    def decode_step(self, data: st.DataObject) -> None:
        """A prompt of one token counts as a decode."""
        self.run(data, [(r, "decode") for r in self.admitted() if r.pending < 2])

    @precondition(lambda self: any(not r.pending for r in self.admitted()))
    @rule(data=st.data())
    def speculative_step(self, data: st.DataObject) -> None:
        self.run(data, [(r, "speculative") for r in self.admitted() if not r.pending])

    @precondition(lambda self: any(r.pending for r in self.admitted()))
    @rule(data=st.data())
    def prefill_step(self, data: st.DataObject) -> None:
        self.run(data, [(r, "prefill") for r in self.admitted() if r.pending])

    def admitted(self) -> list[Request]:
        return [r for r in self.requests if r.slots]

    def run(self, data: st.DataObject, wishes: list[tuple[Request, str]]) -> None:
        work = []
        for request, kind in data.draw(st.permutations(wishes)):
            possible = self.possible(request)
            if kind == ANYTHING:
                kind = data.draw(st.sampled_from(["speculative", "prefill", "decode", "nothing"]))
            if kind in possible:
                work.append(data.draw(possible[kind]))
        options = data.draw(OPTIONS)
        for memory in MEMORY:
            memory.fill_(0xFF)
        self.engine.step(work, **options)

    def possible(self, request: Request) -> dict[str, st.SearchStrategy[Work]]:
        """What this request may do now."""
        decode = st.just(Work(request, "decode"))
        if request.pending:
            sizes = {0, 1, 16, 17, request.pending // 2, request.pending - 1, request.pending}
            chunks = [
                Work(request, "prefill", tokens, checkpoint=offset)
                for tokens in sorted(sizes, reverse=True)
                if tokens <= request.pending
                for offset in range(0, tokens + 1, 16)
            ]
            return {"prefill": st.sampled_from(chunks), "decode": decode}
        most = 1 + self.engine.core.limits.num_spec
        drafts = [
            Work(request, "speculative", tokens, accept)
            for tokens in range(most, 0, -1)
            for accept in range(tokens, -1, -1)
        ]
        return {"speculative": st.sampled_from(drafts), "decode": decode}

    @invariant()
    def guards_stay(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.pool[::2].isnan().all()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for request in self.requests:
                self.compare_from_scratch(request)

    def compare_from_scratch(self, request: Request) -> None:
        """The state against all accepted tokens at once, which no step has seen together."""
        if not request.slots or not request.computed or self.rounded:
            return
        engine = self.engine
        want = recurrent_kda(
            *request.tokens.rows(0, request.computed),
            A_log=engine.A_log,
            dt_bias=engine.dt_bias,
            lower_bound=engine.core.lower_bound,
        ).final_state
        got = engine.pool[request.slots[request.column]]
        assert_close("final_state", got[None], want, self.tolerance)


TestServing = Serving.TestCase
PROFILE = settings()  # what tests/conftest.py loads, or hypothesis' own outside pytest
TestServing.settings = settings(
    PROFILE, max_examples=4 * PROFILE.max_examples, stateful_step_count=40
)
