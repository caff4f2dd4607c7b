# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from trellisbank.checkpoint import open_checkpoint
from trellisbank.files import read_json, write_json
from trellisbank.plan.freeze import load_plan
from trellisbank.provenance.record import run_job
from trellisbank.release.finish import finish_release


def main(job):
    """Complete a release whose shards are written."""
    report = finish_release(
        open_checkpoint(job.params.source),
        load_plan(job.input.plan),
        [read_json(path) for path in job.input.receipts],
        job.params.release,
        calibration=job.params.calibration,
        out_scales="always" if job.params.out_scales else "never",
    )
    write_json(job.output.receipt, report)


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
