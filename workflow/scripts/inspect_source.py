# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from pathlib import Path

from trellisbank.provenance.record import run_job
from trellisbank.source import inspect_source


def main(job):
    """Write the manifest of the source."""
    inspect_source(source=Path(job.input.config).parent, manifest_path=job.output.manifest)


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
