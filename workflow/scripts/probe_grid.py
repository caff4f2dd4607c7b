# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from trellisbank.provenance.record import log, run_job
from trellisbank.quantize.compare import probe_grid


def main(job):
    """Measure whether the FP4 grid matters to the trellis."""
    probe_grid(
        source=job.params.source,
        layers=job.params.layers,
        rates=job.params.rates,
        path=job.output.probe,
        threads=job.threads,
        progress=log.info,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
