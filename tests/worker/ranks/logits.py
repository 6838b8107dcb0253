"""Check that all ranks of a group compute the same logits: `python -m tests.worker.ranks.logits
qwen3:tensor:2`.

Each rank is a process that runs prompts and steps on its shard of a tiny model and sends the others a
checksum of its logits. Prints the number of passes, and in how many of them a rank's logits differed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import mlx.core as mx
import numpy as np

from tests.models.families import PREFIX
from tests.models.fixtures import model_folder
from tests.ports import free_ports
from tests.worker.ranks.lives import Case
from worker.load.sharded.parallelism import ShardGroup

PROMPTS = ((1, 2, 3, 4, 5), (7, 8), tuple(range(3, 60)))
STEPS = 8
WAIT_S = 120.0


def compare(case: Case) -> tuple[int, int]:
    """Return the number of passes, and of those in which ranks differ."""
    folder = model_folder(PREFIX + case.family)
    with tempfile.TemporaryDirectory() as home:
        hosts = Path(home) / "hosts"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(case.ranks)]))
        command = [sys.executable, "-m", "tests.worker.ranks.logits", case.mode, str(folder)]
        environ = os.environ | {"MLX_HOSTFILE": str(hosts)}
        envs = [environ | {"MLX_RANK": str(rank)} for rank in range(case.ranks)]
        ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for env in envs]
        try:
            said = [rank.communicate(timeout=WAIT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    passes, differing = json.loads(said[0].splitlines()[-1])
    return passes, differing


def _run(split: ShardGroup, folder: Path) -> tuple[int, int]:
    network = split.open(folder)
    mx.eval(network.parameters())
    seen: list[bool] = []
    for prompt in PROMPTS:
        caches = network.make_cache()
        tokens = list(prompt)
        for _ in range(STEPS):
            logits = network(mx.array([tokens], mx.uint32), cache=caches)[0, -1]
            told = split.gather(zlib.crc32(np.array(logits.astype(mx.float32)).tobytes()))
            seen.append(len(set(told)) == 1)
            tokens = [int(np.array(mx.argmax(logits)))]
    return len(seen), seen.count(False)


def main(arguments: list[str]) -> int:
    if "MLX_RANK" not in os.environ:
        for name in arguments:
            passes, differing = compare(Case.of(name))
            print(f"{name}: {passes} passes, {differing} differ")
        return 0
    split = ShardGroup("ring", arguments[0])  # type: ignore[arg-type]
    split.join()
    print(json.dumps(_run(split, Path(arguments[1]))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
