# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from pathlib import Path

from trellisbank.evaluate.certificate import FILES, write_certificate
from trellisbank.provenance.record import run_job


def main(job):
    """Gather what a reader needs to recompute the loss of a release."""
    write_certificate(
        release=job.params.release,
        panels={
            panel: {kind: job.input[kind][place] for kind in FILES}
            for place, panel in enumerate(job.params.panels)
        },
        folder=Path(job.output.certificate).parent,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
