# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from trellisbank.provenance.record import log, run_job
from trellisbank.quantize.block import describe_hessians


def main(job):
    """Describe the Hessians of every expert of a layer."""
    describe_hessians(
        source=job.params.source,
        layer=job.params.layer,
        captures=job.input.captures,
        down_weighting=job.params.down_weighting,
        receipt_path=job.output.receipt,
        progress=log.info,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
