# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from pathlib import Path

from trellisbank.checkpoint import open_checkpoint
from trellisbank.files import write_json
from trellisbank.model.config import model_config
from trellisbank.plan.freeze import load_plan, planned_entries
from trellisbank.provenance.record import run_job
from trellisbank.release.verify import refuse_findings, verify_release


def main(job):
    """Hold a release against its source, plan and ledgers."""
    source = open_checkpoint(job.params.source)
    plan = load_plan(job.input.plan)
    experts = model_config(source.config).n_routed_experts
    entries = planned_entries(plan, experts, job.input.ledgers, Path(job.input.plan).parents[1])
    receipt = verify_release(source, job.params.release, plan, entries)
    refuse_findings(receipt, job.params.release)
    write_json(job.output.receipt, receipt)


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
