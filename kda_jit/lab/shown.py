"""What a notebook or a terminal shows of a result: plain text, laid out by rich."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod

from rich.console import Console, RenderableType

_WIDTH = 160


class Shown(ABC):
    """A result whose print is its report. rich prints it in colours."""

    @abstractmethod
    def __rich__(self) -> RenderableType: ...

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(self.__rich__())
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def __repr__(self) -> str:
        return str(self)
