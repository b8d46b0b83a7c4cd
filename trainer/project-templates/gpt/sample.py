"""Let the trained GPT write: python sample.py "def " """

from __future__ import annotations

import sys
from pathlib import Path

import torch
from module import GPT

if __name__ == "__main__":
    newest = max(Path("runs").rglob("manifest.json"), key=lambda path: path.stat().st_mtime).parent
    module = GPT.load_from_checkpoint(newest).eval()
    prompt = (sys.argv[1] if len(sys.argv) > 1 else "def ").encode()
    written = module.net.generate(torch.tensor([list(prompt)]), length=400, temperature=0.8)
    print(bytes(written[0].tolist()).decode(errors="replace"))
