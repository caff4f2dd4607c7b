# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from trellisbank.model.streamed import finish_rows
from trellisbank.provenance.record import run_job


def main(job):
    """Write final hidden states and NLL."""
    finish_rows(
        checkpoint=job.params.checkpoint,
        rows=job.input.rows,
        state=job.input.state,
        hidden=job.output.hidden,
        device=job.params.device,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
