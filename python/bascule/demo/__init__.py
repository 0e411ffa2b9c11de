"""``bascule demo``: a real model's weights move on this machine, are checked, and survive kills.

Two FSDP2 trainer ranks train SmolLM2-135M on the CPU and publish it in bf16. Two engines follow:
e0, three tensor-parallel ranks with fused QKV and gate/up, and e1, one rank with a float32 module
that writes a line of text between updates. Every process is killed once on the way.

Where to read on: `trainer` and `rollout` have all calls of the library, `story` and `kills` are
what happens, and `check` proves it with torch and numpy alone.
"""

from __future__ import annotations

from bascule.demo.command import main

__all__ = ["main"]
