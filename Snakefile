# SPDX-License-Identifier: Apache-2.0
# Trellisbank: from a checkpoint as released to EXL3 releases and their quality report.
from snakemake.utils import min_version

min_version("9.27.1")


if "source" not in config:

    configfile: "config/config.yaml"


report: "report/workflow.rst"


include: "rules/common.smk"
include: "rules/source.smk"
include: "rules/rows.smk"
include: "rules/forward.smk"
include: "rules/hessians.smk"
include: "rules/encode.smk"
include: "rules/plan.smk"
include: "rules/release.smk"
include: "rules/evaluate.smk"
include: "rules/report.smk"


rule all:
    default_target: True
    input:
        rules.report.output.page,


rule release:
    input:
        expand(rules.verify_release.output.receipt, recipe=RECIPES),
