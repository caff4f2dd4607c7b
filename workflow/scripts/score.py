# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from trellisbank.evaluate.scores import score_files
from trellisbank.provenance.record import run_job


def main(job):
    """Score a release against the source."""
    score_files(
        job.input.source,
        job.params.source,
        job.input.release,
        job.params.release,
        job.input.rows,
        job.output.table,
        job.output.summary,
        release_name=job.params.name,
        panel=job.wildcards.panel,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
