# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from pathlib import Path

from trellisbank.provenance.record import run_job
from trellisbank.report.page import write_report


def main(job):
    """Write the quality report."""
    write_report(
        Path(job.output.page).parent,
        run=job.params.run,
        templates=Path(job.input.templates[0]).parent,
        few_tokens=job.params.few_tokens,
        manifest=job.input.manifest,
        plans=job.input.plans,
        receipts=job.input.receipts,
        ledgers=job.input.ledgers,
        captures=job.input.captures,
        hessians=job.input.hessians,
        comparisons=[*job.input.comparisons, *job.input.contests],
        scores=job.input.scores,
        floors=job.input.floors,
        verdicts=job.input.verdicts,
        records=job.input.records,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
