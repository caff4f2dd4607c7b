# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from trellisbank.evaluate.probe import keep_state
from trellisbank.provenance.record import run_job


def main(job):
    """Take the probes' rows through a layer at the base rate."""
    keep_state(
        source=job.params.source,
        bank=job.params.bank,
        layer=job.params.layer,
        rate=job.params.rate,
        rows=job.input.rows,
        state_before=job.input.state[0] if job.input.state else None,
        ledgers=job.input.ledgers,
        state_after=job.output.state,
        device=job.params.device,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
