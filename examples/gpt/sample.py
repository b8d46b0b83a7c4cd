"""Generate text with the trained GPT.

After `trainer fit --config config.yaml`:

    python sample.py --prompt "def "
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from module import GPT


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, help="default: the newest one under runs/gpt")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--length", type=int, default=400, help="bytes to write")
    parser.add_argument("--temperature", type=float, default=0.8, help="lower is safer, higher is wilder")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    # A checkpoint may come from any strategy, and contains the arguments of the model.
    module = GPT.load_from_checkpoint(options.checkpoint or newest_checkpoint(Path("runs/gpt")))
    module.eval()
    assert module.net is not None

    torch.manual_seed(options.seed)
    prompt = torch.tensor([list(options.prompt.encode())])
    written = module.net.generate(prompt, options.length, options.temperature)
    print(bytes(written[0].tolist()).decode(errors="replace").expandtabs(4))


def newest_checkpoint(root: Path) -> Path:
    """Return the newest checkpoint."""
    return max(root.rglob("manifest.json"), key=lambda path: path.stat().st_mtime).parent


if __name__ == "__main__":
    main()
