# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from pathlib import Path

from trellisbank.files import read_json
from trellisbank.provenance.record import log, run_job
from trellisbank.source import verify_shard


def main(job):
    """Verify one shard; its hash need not be computed twice."""
    verify_shard(
        source=Path(job.input.shard).parent,
        shard=f"{job.wildcards.shard}.safetensors",
        receipt_path=job.output.receipt,
        progress=log.info,
    )
    return {job.input.shard: "sha256:" + read_json(job.output.receipt)["sha256"]}


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
