# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from trellisbank.evaluate.gates import judge
from trellisbank.provenance.record import run_job


def main(job):
    """Put verdicts on a release."""
    judge(
        recipe=job.wildcards.recipe,
        comparisons=job.input.comparisons,
        gates=job.params.gates,
        path=job.output.verdict,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
