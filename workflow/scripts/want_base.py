# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from trellisbank.plan.recipe import write_wanted
from trellisbank.provenance.record import run_job


def main(job):
    """List what a recipe needs in the bank."""
    write_wanted(
        recipe=job.params.recipe,
        manifest_path=job.input.manifest,
        wanted_paths=job.output.wanted,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
