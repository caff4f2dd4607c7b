# SPDX-License-Identifier: Apache-2.0
# Rates under a budget: what must be in the bank, then the plan, frozen and hashed.


rule want_base:
    input:
        manifest=rules.inspect_source.output.manifest,
    output:
        wanted=expand("<run>/wanted/{{recipe}}/{layer}.json", layer=LAYERS),
        record="<run>/provenance/want_base/{recipe}.json",
    log:
        "<run>/logs/want_base/{recipe}.log",
    benchmark:
        "<run>/benchmarks/want_base/{recipe}.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("want_base"),
        recipe=lambda wildcards: RECIPES[wildcards.recipe],
    message:
        "List what recipe {wildcards.recipe} needs in the bank"
    script:
        "../workflow/scripts/want_base.py"


rule freeze_plan:
    input:
        manifest=rules.inspect_source.output.manifest,
        ledgers=expand("<run>/encoded/{{recipe}}/{layer}.{block}.json", layer=LAYERS, block=BLOCKS),
    output:
        plan=report(
            "<run>/plan/{recipe}.json",
            caption="../report/captions/plan.rst",
            category="Plans",
            labels={"release": "{recipe}"},
        ),
        record="<run>/provenance/freeze_plan/{recipe}.json",
    log:
        "<run>/logs/freeze_plan/{recipe}.log",
    benchmark:
        "<run>/benchmarks/freeze_plan/{recipe}.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("freeze_plan"),
        recipe=lambda wildcards: RECIPES[wildcards.recipe],
    message:
        "Freeze the plan of recipe {wildcards.recipe}"
    script:
        "../workflow/scripts/freeze_plan.py"
