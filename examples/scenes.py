"""Synthetic clips of coloured shapes that move, each named by a prompt such as "a red ball bounces".

`train_demo.py` trains the demo's small LTX-Video on them, and `recognise` reads from a clip what it shows.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import torch
from torch import Tensor

COLOURS = {
    "red": (0.90, 0.10, 0.10),
    "green": (0.10, 0.65, 0.15),
    "blue": (0.10, 0.25, 0.90),
    "yellow": (0.95, 0.85, 0.10),
    "purple": (0.60, 0.10, 0.80),
    "orange": (1.00, 0.50, 0.00),
}
SHAPES = "ball", "square", "triangle"
MOTIONS = "bounces", "moves left", "moves right", "rises"


def _prompt(colour: str, shape: str, motion: str) -> str:
    return f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape} {motion}"


PROMPTS = [_prompt(*words) for words in itertools.product(COLOURS, SHAPES, MOTIONS)]
WORDS = sorted({word for prompt in PROMPTS for word in prompt.split()})

FLOOR = 0.85  # lengths are parts of the height, and y points downwards
LIGHT = -0.48, -0.64, 0.60  # where the light comes from: left, above, in front


@dataclasses.dataclass
class Scenes:
    prompts: Tensor  # [n], indices into PROMPTS
    radius: Tensor  # [n]
    x: Tensor  # [n, frames], centres of the shapes
    y: Tensor


def random_scenes(
    count: int, frames: int, height: int, width: int, generator: torch.Generator, prompts: Tensor | None = None
) -> Scenes:
    """`count` scenes of random prompts, or of those given; on the generator's device."""
    device = generator.device

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, generator=generator, device=device)

    if prompts is None:
        prompts = torch.randint(len(PROMPTS), (count,), generator=generator, device=device)
    motion = (prompts % len(MOTIONS))[:, None]
    radius, time, aspect = uniform(0.12, 0.16), torch.linspace(0, 1, frames, device=device), width / height
    left, right, lowest = radius, aspect - radius, FLOOR - radius
    # Bounces: parabolas on the floor, and a slow drift that stays in the picture.
    fall = (uniform(1.2, 1.8) * time + uniform(0, 1)) % 1
    y = lowest - uniform(0.35, 0.55) * 4 * fall * (1 - fall)
    x = left + (right - left) * (uniform(0.3, 0.7) + uniform(-0.2, 0.2) * time)
    # Moves: a straight line across most of the picture, at one height.
    way = (right - left) * uniform(0.7, 0.9)
    level = uniform(0.25, 0.65).expand_as(y)
    to_right = left + uniform(0, 0.1) * aspect + way * time
    x = torch.where(motion == 1, aspect - to_right, torch.where(motion == 2, to_right, x))
    y = torch.where((motion == 1) | (motion == 2), level, y)
    # Rises: from the floor to the top, in one place.
    x = torch.where(motion == 3, left + (right - left) * uniform(0.1, 0.9), x)
    y = torch.where(motion == 3, lowest - (lowest - radius) * uniform(0.7, 0.9) * time, y)
    return Scenes(prompts, radius[:, 0], x, y)


def draw(scenes: Scenes, height: int, width: int, columns: int | None = None) -> Tensor:
    """The clips, [n, 3, frames, height, width] in -1..1.

    Args:
        columns: Draw so many columns around the middle of the shape's path, instead of the whole width.
    """
    device = scenes.x.device
    left = torch.zeros(len(scenes.x), device=device)
    if columns is not None:
        left = (scenes.x.mean(1) * height - columns / 2).clamp(0, width - columns).floor()
    across = (left[:, None] + torch.arange(columns or width, device=device) + 0.5) / height
    down = (torch.arange(height, device=device) + 0.5).expand(len(left), -1) / height
    radius = scenes.radius[:, None, None, None]
    dx = across[:, None, None, :] - scenes.x[..., None, None]  # [n, frames, 1, columns]
    dy = down[:, None, :, None] - scenes.y[..., None, None]  # [n, frames, rows, 1]
    shape = (scenes.prompts // len(MOTIONS) % len(SHAPES))[:, None, None, None]
    # Signed distances to the edges of a ball, a square and a triangle; an edge is one pixel wide.
    ball = (dx.square() + dy.square()).sqrt() - radius
    square = torch.maximum(dx.abs(), dy.abs()) - 0.85 * radius
    triangle = torch.maximum(dy - 0.75 * radius, dx.abs() * math.cos(0.5) - (dy + radius) * math.sin(0.5))
    distance = torch.where(shape == 0, ball, torch.where(shape == 1, square, triangle))
    cover = (0.5 - distance * height).clamp(0, 1)[:, None]
    # A ball is lit as a sphere, the other shapes as flat ones.
    depth = (1 - (dx.square() + dy.square()) / radius.square()).clamp(0, 1).sqrt()
    lit = (LIGHT[0] * dx / radius + LIGHT[1] * dy / radius + LIGHT[2] * depth).clamp(0, 1)
    brightness = torch.where(shape == 0, 0.55 + 0.55 * lit, 0.95)[:, None]
    colour = torch.tensor(list(COLOURS.values()), device=device)[scenes.prompts // (len(MOTIONS) * len(SHAPES))]
    shine = torch.where(shape == 0, 0.6 * lit**12, 0.0)[:, None]
    painted = (colour[:, :, None, None, None] * brightness + shine).clamp(0, 1)
    # A grey wall over a darker floor, with a shadow under the shape.
    floor = ((down - FLOOR) * height + 0.5).clamp(0, 1)[:, None, :, None]
    height_above = (FLOOR - scenes.y - scenes.radius[:, None]).clamp(0)[..., None, None]
    ellipse = (dx / radius).square() + ((down - FLOOR - 0.04)[:, None, :, None] / 0.05).square()
    shadow = (1.2 - ellipse).clamp(0, 1) * (0.45 * torch.exp(-2 * height_above))
    wall = 0.92 - 0.12 * down[:, None, :, None]
    background = (wall * (1 - floor) + (0.55 - shadow) * floor)[:, None]
    return (background * (1 - cover) + painted * cover) * 2 - 1


def recognise(frames: np.ndarray) -> str | None:
    """What a clip shows, in the words of PROMPTS; None where no frame, or not every one, has one coloured shape.

    Args:
        frames: [frames, height, width, 3] in 0..1.
    """
    coloured = frames.max(-1) - frames.min(-1) > 0.3
    if (coloured.mean((1, 2)) < 0.005).any():
        return None
    mean = frames[coloured].mean(0)
    palette = np.array(list(COLOURS.values()))
    unit = [rgb / np.linalg.norm(rgb, axis=-1, keepdims=True) for rgb in (palette, mean)]
    colour = list(COLOURS)[int((unit[0] @ unit[1]).argmax())]
    filled, path = [], []
    for mask in coloured:
        rows, columns = (np.flatnonzero(mask.mean(axis) > 0.01) for axis in (1, 0))
        if not len(rows) or not len(columns):
            return None
        box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        filled.append(box.mean())
        path.append((np.nonzero(mask)[1].mean(), np.nonzero(mask)[0].mean()))
    # Parts of their box: a square's is 1, a ball's pi / 4, a triangle's 1 / 2.
    shape = SHAPES[int(np.abs(np.median(filled) - np.array((math.pi / 4, 1.0, 0.5))).argmin())]
    x, y = (np.array(path) / frames.shape[1]).T
    if abs(x[-1] - x[0]) > 0.45:
        motion = "moves right" if x[-1] > x[0] else "moves left"
    elif y[0] - y[-1] > 0.35 and (np.diff(y) < 0.01).all():
        motion = "rises"
    else:
        motion = "bounces"
    return _prompt(colour, shape, motion)
