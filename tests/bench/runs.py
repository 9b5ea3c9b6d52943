"""A run file made by hand: no time in it is real."""

from __future__ import annotations

from typing import Any


def timing(us: float, spread: float = 0.01, **facts: Any) -> dict[str, Any]:
    return {"us": us, "p10": us * (1 - spread), "p90": us * (1 + spread), "runs": 20} | facts


def row(
    case: str, lengths: list[int], heads: int, ours: float, peer: float, **more: Any
) -> dict[str, Any]:
    timings = {"cuda": timing(ours, backend="cuda"), "flashkda": timing(peer)}
    head = {"case": case, "lengths": lengths, "heads": heads, "floor_us": ours / 4, "us": ours}
    return head | {"vs_flashkda": peer / ours, "timings": timings} | more


def run(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gpu": "H200", "date": "2026-01-02", "commit": "1a2b3c4", "conditions": "L2 cold, medians",
        "device": {"driver": "1"}, "versions": {"torch": "2"}, "peers": {"flashkda": "1"},
        "copy_tb_per_s": 4.0, "accuracy": [], "summary": {}, "rows": list(rows),
    }  # fmt: skip
    return found | more
