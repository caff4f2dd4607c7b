# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from pathlib import Path

from trellisbank.plan.recipe import freeze_recipe
from trellisbank.provenance.record import run_job


def main(job):
    """Freeze a plan from its ledgers."""
    freeze_recipe(
        name=job.wildcards.recipe,
        recipe=job.params.recipe,
        manifest_path=job.input.manifest,
        ledgers=job.input.ledgers,
        statistics=job.input.statistics,
        probes=job.input.probes,
        root=Path(job.output.plan).parents[1],
        plan_path=job.output.plan,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
