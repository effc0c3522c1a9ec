"""Reads back what the examples write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


def decoded(path: Path) -> np.ndarray:
    """[frames, height, width, 3] of a video, in 0..255."""
    if path.suffix == ".mp4":
        imageio = pytest.importorskip("imageio.v2")
        return np.stack(imageio.mimread(path, memtest=False))
    image_module = pytest.importorskip("PIL.Image")
    with image_module.open(path) as image:
        frames = []
        for index in range(image.n_frames):
            image.seek(index)
            frames.append(np.asarray(image.convert("RGB")))
        return np.stack(frames)
