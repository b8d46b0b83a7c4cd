"""Draw what the generator has learnt: python sample.py"""

from __future__ import annotations

from pathlib import Path

import torch
from module import GAN


def drawn(images: torch.Tensor) -> str:
    """Images (count, 1, 8, 8) in -1..1 side by side, as text: bright pixels are dense characters."""
    shades = " .:-=+*#%@"
    levels = ((images[:, 0] + 1) / 2 * (len(shades) - 1)).round().long().clamp(0, len(shades) - 1)
    rows = levels.permute(1, 0, 2).tolist()
    return "\n".join("  ".join("".join(shades[level] * 2 for level in line) for line in row) for row in rows)


if __name__ == "__main__":
    newest = max(Path("runs").rglob("manifest.json"), key=lambda path: path.stat().st_mtime).parent
    module = GAN.load_from_checkpoint(newest).eval()
    with torch.no_grad():
        print(drawn(module(module.noise(6))))
