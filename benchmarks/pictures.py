"""How pictures are kept: png of few colours, a third of the bytes of matplotlib's own."""

import io
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

COLORS = 128
DPI = 100


def save(figure: Figure, path: Path, *, tight: bool = True) -> Path:
    """Write the figure and close it. ``tight``: cut what is empty around it."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI, bbox_inches="tight" if tight else None)
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
    return path
