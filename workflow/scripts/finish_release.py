# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from pathlib import Path

from trellisbank.bank import Bank
from trellisbank.checkpoint import open_checkpoint
from trellisbank.files import read_json, write_json
from trellisbank.model.config import model_config
from trellisbank.plan.freeze import load_plan, planned_entries
from trellisbank.plan.layouts import BANK_PLAN
from trellisbank.provenance.record import run_job
from trellisbank.release.bank_plan import finish_bank_plan
from trellisbank.release.finish import finish_release


def main(job):
    """Complete a release whose shards are written."""
    source, plan = open_checkpoint(job.params.source), load_plan(job.input.plan)
    receipts = [read_json(path) for path in job.input.receipts]
    if plan["layout"] == BANK_PLAN:
        experts = model_config(source.config).n_routed_experts
        root = Path(job.input.plan).parents[1]
        entries = planned_entries(plan, experts, job.input.ledgers, root)
        keys = {place: entry["key"] for place, entry in entries.items()}
        bank = Bank(job.params.bank)
        report = finish_bank_plan(source, plan, receipts, bank, keys, job.params.release)
    else:
        report = finish_release(
            source,
            plan,
            receipts,
            job.params.release,
            calibration=job.params.calibration,
            out_scales="always" if job.params.out_scales else "never",
        )
    write_json(job.output.receipt, report)


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
