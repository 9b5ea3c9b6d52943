"""What commands write, so that everybody can read it."""

from __future__ import annotations

import io
import json
import math
import sys
from typing import Any


def as_json(value: object) -> str:
    """JSON as the standard has it, without infinities and NaN: they become "inf" and "nan"."""
    return json.dumps(_plain(value), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def escape_what_cannot_be_shown() -> None:
    """From here on a character that the terminal's encoding lacks is escaped, and no error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
