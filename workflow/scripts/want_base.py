# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from trellisbank.plan.recipe import write_base
from trellisbank.provenance.record import run_job


def main(job):
    """List what must be in the bank before anything is measured."""
    write_base(
        recipe=job.params.recipe,
        manifest_path=job.input.manifest,
        statistics=job.input.statistics,
        wanted_paths=job.output.wanted,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
