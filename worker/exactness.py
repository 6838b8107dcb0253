"""`python -m worker.exactness MODEL`: measure a model for `roundhouse doctor` and print JSON."""

from __future__ import annotations

import logging
import os
import sys

import msgspec

from protocol import logs
from worker import file_limit, kernel_folder
from worker.contract.engine import InsufficientMemoryError, Model, ModelError
from worker.preload import preload_openblas


def main() -> int:
    """Print what was measured as JSON. Return the exit status: 1 with a sentence on stderr if it cannot be
    loaded."""
    [model] = sys.argv[1:]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    logs.setup("exactness", "text", "error")
    preload_openblas(sys.argv)
    file_limit.import_upstream()
    kernel_folder.protect()
    from worker.models.load import ModelLoader

    try:
        loaded = ModelLoader(model, measurement="table").load(lambda done, total: None)
    except (ModelError, InsufficientMemoryError) as error:
        print(error, file=sys.stderr)
        return 1
    found = loaded.info.exactness if isinstance(loaded, Model) else None
    if found is None:
        print("only models that generate text can be measured.", file=sys.stderr)
        return 1
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as in `worker.__main__`
