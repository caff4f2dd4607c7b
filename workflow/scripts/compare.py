# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from trellisbank.evaluate.bootstrap import compare_files
from trellisbank.provenance.record import run_job


def main(job):
    """Put intervals on what a release lost."""
    compare_files(
        job.input.table,
        job.output.comparison,
        seed=job.params.seed,
        draws=job.params.draws,
        confidence=job.params.confidence,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
