# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from pathlib import Path

from trellisbank.bank import Bank
from trellisbank.checkpoint import open_checkpoint
from trellisbank.files import read_json, write_json
from trellisbank.model.config import model_config
from trellisbank.plan.freeze import load_plan, planned_entries
from trellisbank.provenance.record import run_job
from trellisbank.release.splice import splice_shard


def main(job):
    """Write one shard of a release, or link it where nothing changed."""
    source = open_checkpoint(job.params.source)
    plan = load_plan(job.input.plan)
    entries = planned_entries(
        plan,
        model_config(source.config).n_routed_experts,
        job.input.ledgers,
        Path(job.input.plan).parents[1],
        job.params.layers,
    )
    receipt = splice_shard(
        source,
        f"{job.wildcards.shard}.safetensors",
        plan,
        Bank(job.params.bank),
        {place: entry["key"] for place, entry in entries.items()},
        job.params.release,
        read_json(job.input.verified)["sha256"],
    )
    write_json(job.output.receipt, receipt)


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
