# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from trellisbank.evaluate.probe import probe_layer
from trellisbank.provenance.record import log, run_job


def main(job):
    """Measure what each encoded matrix group of a layer loses alone."""
    probe_layer(
        source=job.params.source,
        bank=job.params.bank,
        layer=job.params.layer,
        rows=job.input.rows,
        state_before=job.input.state[0] if job.input.state else None,
        hidden=job.input.hidden,
        ledgers=job.input.ledgers,
        base=job.input.base,
        probes_path=job.output.probes,
        device=job.params.device,
        progress=log.info,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
