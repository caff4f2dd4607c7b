# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rules capture and forward."""

from trellisbank.model.streamed import stream_layer
from trellisbank.provenance.record import run_job


def main(job):
    """Take the rows through one layer."""
    stream_layer(
        checkpoint=job.params.checkpoint,
        layer=job.params.layer,
        rows=job.input.rows,
        state_before=job.input.state[0] if job.input.state else None,
        state_after=job.output.state,
        stats=job.output.stats,
        capture=job.output.get("capture"),
        wide=job.params.wide,
        device=job.params.device,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
