# SPDX-License-Identifier: Apache-2.0
# Trellisbank: from a checkpoint as released to EXL3 releases and their quality report.
from snakemake.utils import min_version

min_version("9.27.1")


# A file named on the command line stands alone; merged into this one it would inherit its panels.
if not workflow.configfiles:

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
        expand(rules.certificate.output.certificate, recipe=RECIPES),
        rules.enforce_gates.output.passed if settings["gates"]["strict"] else [],


rule captures:
    input:
        expand(rules.capture.output.capture, split=SPLITS, layer=LAYERS),
        expand(rules.hessians.output.receipt, layer=LAYERS),


rule release:
    input:
        expand(rules.verify_release.output.receipt, recipe=RECIPES),
