# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from trellisbank.evaluate.gates import check_reference
from trellisbank.provenance.record import run_job


def main(job):
    """Fail where the source is not what it should be."""
    check_reference(
        hidden=job.input.hidden,
        panel=job.wildcards.panel,
        nll=tuple(job.params.nll),
        path=job.output.receipt,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
