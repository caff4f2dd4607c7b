# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from trellisbank.evaluate.gates import enforce
from trellisbank.provenance.record import run_job


def main(job):
    """Fail unless every release was accepted."""
    enforce(job.input.verdicts, job.output.passed)


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
