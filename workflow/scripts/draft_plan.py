# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from trellisbank.plan.recipe import write_draft
from trellisbank.provenance.record import run_job


def main(job):
    """List what a draft of the plan names beyond the base."""
    write_draft(
        recipe=job.params.recipe,
        ledgers=job.input.ledgers,
        statistics=job.input.statistics,
        probes=job.input.probes,
        wanted_paths=job.output.wanted,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
