# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rules compare and compare_recipes."""

from trellisbank.evaluate.bootstrap import compare_files
from trellisbank.provenance.record import run_job


def main(job):
    """Put intervals on what a release lost, against the source or another release."""
    compare_files(
        job.input.table,
        job.output.comparison,
        baseline_path=job.input.get("baseline"),
        seed=job.params.seed,
        draws=job.params.draws,
        confidence=job.params.confidence,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
