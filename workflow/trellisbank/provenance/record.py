# SPDX-License-Identifier: Apache-2.0
"""One record for each job: what went in, what came out, by which code, where and when.

Receipts, ledgers and plans hold no time and no host, so that the same inputs give the same bytes;
what differs from run to run stands here.
"""

from __future__ import annotations

import logging
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trellisbank.errors import TrellisbankError
from trellisbank.files import blake3_file, write_json

LIBRARIES = ("trellisbank", "torch", "numpy", "numba", "safetensors", "tokenizers", "snakemake")
log = logging.getLogger("trellisbank")


def run_job(job: Any, work: Callable[[Any], Mapping[str, str] | None]) -> None:
    """Run the body of a rule's script: pinned threads, log, error message, record.

    Args:
        job: The `snakemake` object of a script; its output `record` is written here, all others
            by `work`.
        work: Does the rule's work; may return hashes that it knows already, by path
            (`sha256:...`), which spares reading those files again.

    Raises:
        SystemExit: With code 1 after a TrellisbankError, whose message goes to log and stderr.
        Exception: Anything else; its traceback goes to the log first.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    handlers += [logging.FileHandler(path, mode="w") for path in job.log]
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", handlers=handlers, force=True
    )
    pin_threads(job.threads)
    start = datetime.now(UTC)
    clock = time.monotonic()
    try:
        known = work(job) or {}
    except TrellisbankError as trouble:
        log.error("%s: %s", type(trouble).__name__, trouble)
        sys.exit(1)
    except Exception:
        log.exception("%s failed", job.rule)
        raise
    seconds = time.monotonic() - clock
    record = {
        "schema": "trellisbank/record/1",
        "rule": job.rule,
        "wildcards": dict(job.wildcards.items()),
        "inputs": [_describe(path, known) for path in job.input],
        "outputs": [_describe(path, known) for path in job.output if path != job.output.record],
        "parameters": {name: value for name, value in job.params.items() if name != "code"},
        "code": job.params.code,
        "versions": {"python": platform.python_version()} | _versions(),
        "host_class": host_class(),
        "threads": job.threads,
        "start": start.isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
        # Kilobytes on Linux.
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    write_json(job.output.record, record)


def pin_threads(threads: int) -> None:
    """Give torch this many threads: its sums, and so the bytes, may depend on their number."""
    import torch  # here, so that jobs without tensors do not pay for it

    torch.set_num_threads(threads)


def host_class() -> dict[str, str]:
    """What of the machine can change bytes: system, processor family, vector instructions."""
    import torch

    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _describe(path: str, known: Mapping[str, str]) -> dict[str, Any]:
    described: dict[str, Any] = {"path": os.fspath(path), "bytes": Path(path).stat().st_size}
    if path in known:
        kind, value = known[path].split(":", 1)
        return described | {kind: value}
    return described | {"blake3": blake3_file(path)}
