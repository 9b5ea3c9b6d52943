"""The picture of a comparison; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .compare import CHUNK, Along, Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage


def draw(c: Comparison, path: Path) -> None:
    """The errors along the sequence with the worst block, and by head and chunk."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    assert c.along is not None
    names = c.a.title, c.b.title
    figure, axes = plt.subplot_mosaic(
        [["along", "along"], ["a", "b"]], figsize=(11, 7.5), layout="constrained"
    )
    _draw_along(axes["along"], c.along, names)
    positive = torch.cat([c.along.blocks_a.flatten(), c.along.blocks_b.flatten()])
    positive = positive[(positive > 0) & positive.isfinite()]
    image = None
    for key, blocks, name in (("a", c.along.blocks_a, names[0]), ("b", c.along.blocks_b, names[1])):
        image = _draw_blocks(axes[key], blocks, name, positive)
    assert image is not None
    figure.colorbar(image, ax=[axes["a"], axes["b"]], label="relative RMS error of a block")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_along(axis: Axes, along: Along, names: tuple[str, str]) -> None:
    apart = f"{names[1]} against {names[0]}"
    for error, label, style in (
        (along.a, f"{names[0]} against float64", "-"),
        (along.b, f"{names[1]} against float64", "-"),
        (along.apart, apart, "k:"),
    ):
        shown = torch.where(error > 0, error, torch.nan)
        axis.plot(along.tokens, shown.numpy(), style, linewidth=1.4, label=label)
    axis.set(
        title=f"RMS error of out along sequence {along.sequence}, all heads",
        xlabel="token",
        ylabel="of the exact output's RMS",
        yscale="log",
        xlim=(0, None),
    )
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_blocks(axis: Axes, blocks: Tensor, name: str, positive: Tensor) -> AxesImage:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    low, high = (positive.min().item(), positive.max().item()) if len(positive) else (1e-9, 1.0)
    image = axis.imshow(
        blocks.T.clamp(min=low, max=high).numpy(),
        aspect="auto",
        interpolation="nearest",
        cmap="magma",
        norm=LogNorm(low, max(high, low * 1.01)),
    )
    axis.set(title=f"{name} against float64", xlabel=f"chunk of {CHUNK} tokens", ylabel="head")
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_locator(MaxNLocator(integer=True))
    return image
