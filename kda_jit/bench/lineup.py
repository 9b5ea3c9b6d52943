"""Who runs a case: subjects of ours, peers, and the gate that they have to pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kda_jit import settings
from kda_jit.errors import InputError, NoBackendError
from kda_jit.resolver import resolve_backend

from .cases import BenchCase, TimedCase
from .gate import Gate
from .peers import PEERS, FlashKDA, Peer, find_peers
from .step_gate import StepGate
from .step_peers import STEP_PEERS, StepPeer, find_step_peers
from .step_subjects import Layer, Recurrent
from .steps import StepCase
from .subject import Ours, Own, Subject, schedules_for

#: The schedule that every other one is compared with on the full shape.
BASELINE = Ours("cuda", "portable")

AnyPeer = Peer | StepPeer


class Lineup(NamedTuple):
    """Who runs one case.

    ours    pass the gate; the first is whose times the row's head shows
    peers   must agree with the first
    beside  those of ours that the row's head compares with the first, as it does with peers
    """

    ours: Sequence[Own]
    peers: Sequence[AnyPeer] = ()
    beside: Sequence[Own] = ()


class Contest:
    """Who runs what, as the command's options ask."""

    def __init__(
        self, ours: Sequence[Ours], peers: Sequence[Peer], step_peers: Sequence[StepPeer] = ()
    ) -> None:
        self.ours, self.peers, self.step_peers = ours, peers, step_peers

    @property
    def versions(self) -> dict[str, str]:
        """Of every peer."""
        return {peer.name: peer.version for peer in (*self.peers, *self.step_peers)}

    def lineup(self, case: TimedCase) -> Lineup:
        """The recurrent kernel is Triton's, but for the torch backend; layers of the CUDA backend
        are compared with one whose prefills are Triton's, too."""
        if not isinstance(case, StepCase):
            return Lineup(self.ours, self.peers)
        peers = [peer for peer in self.step_peers if peer.suite == case.suite]
        if case.suite == "decode":
            backend = "torch" if self.ours[0].backend == "torch" else "triton"
            return Lineup([Recurrent(backend)], peers)
        layers = [Layer(subject.backend, subject.schedule) for subject in self.ours]
        beside = [Layer("triton")] if layers[0].backend == "cuda" else []
        first, variants = layers[0], []
        if case.decodes and case.prefills:
            variants = [Layer(first.backend, first.schedule, apart) for apart in (True, False)]
        return Lineup([*layers, *beside, *variants], peers, beside)

    def tabled(self, device: torch.device) -> list[Subject]:
        """What the accuracy table compares: what is timed, and every other backend that runs."""
        timed = {subject.backend for subject in self.ours}
        others = []
        for name in ("cuda", "triton", "torch"):
            try:
                resolve_backend(
                    name, head_dim=128, dtype=torch.bfloat16, lower_bound=-5.0, device=device
                )
            except NoBackendError:
                continue
            if name not in timed:
                others.append(Ours(name))
        return [*self.ours, *others, *self.peers]


def gate_of(case: TimedCase, inputs: Any) -> Gate | StepGate:
    """inputs: those of the case."""
    if isinstance(case, BenchCase):
        return Gate(case, inputs)
    return StepGate(inputs)


def find_ours(backend: str, asked: Sequence[str] | None, device: torch.device) -> list[Ours]:
    """What to time. Raises InputError for a schedule that this GPU does not have."""
    if backend != "cuda":
        return [Ours(backend)]
    known = schedules_for(torch.cuda.get_device_capability(device)[0])
    names = list(asked or [settings.schedule()])
    for name in names:
        if name not in ("auto", "all", *known):
            raise InputError(f"schedule: expected auto, all, {', '.join(known)}, got {name!r}.")
    every = [n for name in names for n in (known if name == "all" else [name])]
    return [Ours(backend, name) for name in dict.fromkeys(every)]


def find_all_peers(
    asked: Sequence[str] | None, flashkda: Path | None, sources: Path | None
) -> tuple[list[Peer], list[StepPeer]]:
    """(peers of prefills, peers of steps): those asked for, which must run, else those here.

    asked     names of PEERS and STEP_PEERS
    flashkda  FlashKDA's library; sources  vLLM's Triton sources
    """
    for name in asked or ():
        if name not in (*PEERS, *STEP_PEERS):
            known = ", ".join((*PEERS, *STEP_PEERS))
            raise InputError(f"peer: expected one of {known}, got {name!r}.")
    prefills = None if asked is None else [name for name in asked if name in PEERS]
    steps = None if asked is None else [name for name in asked if name in STEP_PEERS]
    return (
        find_peers(prefills, flashkda),
        find_step_peers(steps, FlashKDA(flashkda), sources and sources.expanduser().resolve()),
    )
