# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from trellisbank.provenance.record import run_job
from trellisbank.rows import pick_rows


def main(job):
    """Pick some rows of the splits."""
    pick_rows(
        splits=job.input.splits,
        windows=job.params.windows,
        ids_path=job.output.rows,
        receipt_path=job.output.receipt,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
